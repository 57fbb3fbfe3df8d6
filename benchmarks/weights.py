"""A policy version from the trainer's tensors to an engine that serves it, against one memory copy of the same size.

    python benchmarks/weights.py [--out results.json] [--mb 500] [--versions 8]

A trainer and an engine in two processes, the real bus, publisher and receiver. The engine keeps stepping (a matrix
product with its weights) while it stages in a thread, and swaps between two steps. Reported are the best and the median
version: `published` is how long the trainer is blocked, `serving` the time from there on to the first step with the new
weights, `pause` the time between two steps that the swap takes.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import uvloop
from numpy.typing import NDArray
from report import Report
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer
from penstock.shared.weights import Staged, cleanup, layout_of, open_publisher, open_receiver

JOB, ANNOUNCE, SERVED = "bench", "bench.announce", "bench.served"
DEADLINE_S = 60.0


class Served(msgspec.Struct, frozen=True):
    """What the engine measured of one version; times are of the machine's monotonic clock."""

    version: int
    staged: float
    serving: float
    pause_s: float
    longest_step_s: float


def model(megabytes: int) -> dict[str, Tensor]:
    """Named float32 tensors like those of a decoder, of about ``megabytes`` in all."""
    width = 1024 if megabytes < 400 else 2048
    shapes = {"q": (width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, width)}
    shapes |= {"gate": (3 * width, width), "up": (3 * width, width), "down": (width, 3 * width)}
    tensors: dict[str, Tensor] = {}
    layer, left = 0, megabytes * 1_000_000
    while left > 0:
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}"] = torch.zeros(shape)
            left -= 4 * shape[0] * shape[1]
        tensors[f"layers.{layer}.norm"] = torch.zeros(width)
        layer += 1
    return tensors


async def engine(url: str, shm_dir: str) -> None:
    """Step, stage in a thread, swap between steps, report."""
    torch.set_num_threads(1)
    receiver = open_receiver(ServiceSettings(host_id="bench", shm_dir=Path(shm_dir)))
    current: Staged | None = None
    staging: asyncio.Task[tuple[Staged, float]] | None = None
    queue: asyncio.Queue[WeightManifest] = asyncio.Queue()
    longest, hidden = 0.0, torch.ones(1, 2048)

    async def stage(manifest: WeightManifest) -> tuple[Staged, float]:
        return await asyncio.to_thread(receiver.stage, manifest), time.monotonic()

    async with await Bus.connect(url, name="engine") as bus:
        await bus.subscribe(
            ANNOUNCE, lambda _, data: queue.put_nowait(msgspec.msgpack.decode(data, type=WeightManifest))
        )
        await bus.rtt()
        print("READY", flush=True)
        while True:
            begin = time.monotonic()
            if current is not None:
                weight = current.tensors()["layers.0.q"]
                hidden[:, : weight.shape[1]] @ weight.T
            if staging is None and not queue.empty():
                staging, longest = asyncio.create_task(stage(queue.get_nowait())), 0.0
            if staging is not None and staging.done():
                (staged, at), staging = staging.result(), None
                before = time.monotonic()
                previous, current = current, staged
                tensors = current.tensors()
                if previous is not None:
                    previous.release()
                after = time.monotonic()
                version = current.manifest.version
                for tensor in tensors.values():
                    assert float(tensor.flatten()[0]) == float(tensor.flatten()[-1]) == version
                done = Served(version, at, after, after - before, longest)
                await bus.notify(SERVED, msgspec.msgpack.encode(done))
            await asyncio.sleep(0.0005)
            longest = max(longest, time.monotonic() - begin)


def trainer(args: argparse.Namespace, report: Report) -> None:
    """Publish version after version and wait until each is served."""
    torch.set_num_threads(1)
    with NatsServer() as server, tempfile.TemporaryDirectory(dir=args.shm_dir) as directory:
        command = [sys.executable, __file__, "--engine", server.url, directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                uvloop.run(publish_all(args, report, server.url, Path(directory)))
            finally:
                process.kill()


async def publish_all(args: argparse.Namespace, report: Report, url: str, directory: Path) -> None:
    weights = model(args.mb)
    layout = layout_of(weights.items())
    settings = ServiceSettings(host_id="bench", shm_dir=directory, data_dir=directory)
    begin = time.monotonic()
    publisher = open_publisher(JOB, layout, settings)
    opened = time.monotonic() - begin
    source, target = np.ones(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    served: asyncio.Queue[Served] = asyncio.Queue()
    rows: list[dict[str, float]] = []
    async with await Bus.connect(url, name="trainer") as bus:
        await bus.subscribe(SERVED, lambda _, data: served.put_nowait(msgspec.msgpack.decode(data, type=Served)))
        await bus.rtt()
        for version in range(1, args.versions + 1):
            start, copied = await asyncio.to_thread(next_weights, weights, version, source, target)
            begin = time.monotonic()
            manifest = await asyncio.to_thread(publisher.publish, weights.items(), version=version, epoch=1)
            published = time.monotonic()
            await bus.notify(ANNOUNCE, msgspec.msgpack.encode(manifest))
            done = await asyncio.wait_for(served.get(), DEADLINE_S)
            assert done.version == version
            rows.append(
                {
                    "memcpy": copied - start,
                    "published": published - begin,
                    "staged": done.staged - begin,
                    "serving": done.serving - begin,
                    "pause": done.pause_s,
                    "longest_step": done.longest_step_s,
                }
            )
    publisher.close()
    cleanup(JOB, settings)
    summarize(report, rows, layout.nbytes, opened)


def next_weights(
    weights: dict[str, Tensor], version: int, source: NDArray[np.uint8], target: NDArray[np.uint8]
) -> tuple[float, float]:
    """What an optimizer step would do, and then one copy of as many bytes; returns when the copy began and ended."""
    for tensor in weights.values():
        tensor.fill_(float(version))
    start = time.monotonic()
    np.copyto(target, source)
    return start, time.monotonic()


def summarize(report: Report, rows: Sequence[dict[str, float]], nbytes: int, opened: float) -> None:
    """Fill the report; the first versions map fresh slots and are shown apart."""
    warm = rows[3:]
    memcpy, usual = min(row["memcpy"] for row in warm), float(np.median([row["memcpy"] for row in warm]))
    texts = {
        "memcpy": "one copy of the bytes, warm",
        "published": "trainer blocked (copy and digest)",
        "staged": "staged and verified in the engine",
        "serving": "serving (swapped at a token boundary)",
        "pause": "pause of the engine",
        "longest_step": "longest engine step while staging",
    }
    for key, text in texts.items():
        values = sorted(row[key] for row in warm)
        best, median = values[0], values[len(values) // 2]
        cells = [f"{value * 1e3:.2f}" for value in (best, median, rows[0][key])]
        report.row(text, *cells, f"{best / memcpy:.2f}", f"{median / usual:.2f}")
    report.results = {"bytes": nbytes, "open_s": opened, "versions": rows}
    serving, pause = min(row["serving"] for row in warm), max(row["pause"] for row in warm)
    report.check(f"serving after {serving / memcpy:.2f} x memcpy, target 3", serving <= 3 * memcpy)
    report.check(f"longest pause of all versions {pause * 1e3:.3f} ms, target 1", pause <= 1e-3)


def main() -> int:
    if sys.argv[1:2] == ["--engine"]:
        uvloop.run(engine(*sys.argv[2:4]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--mb", type=int, default=500, help="megabytes of weights")
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    report = Report(
        f"Weights, {args.mb} MB of float32, shm",
        ["", "best ms", "median ms", "first ms", "best x memcpy", "median x memcpy"],
    )
    trainer(args, report)
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
