"""A policy version from the trainer's tensors to an engine that serves it, against one memory copy of the same size.

    python benchmarks/weights.py [--out results.json] [--mb 500] [--versions 10]

A trainer and an embedded engine in two processes: the real bus, publisher, receiver and engine, a real model. The first
half of the versions meets an idle engine, the second one that decodes four sequences all the time. `published` is how
long the trainer is blocked, `serving` the time from the beginning of the publication until the engine serves the new
weights, `pause` how long the decoding thread stands still for the swap, `gap` the longest time between two tokens of a
sequence meanwhile: one step, slowed down by the copy beside it, and after the swap the old tokens once more under the
new weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from transformers import PreTrainedModel

from penstock.services.rollout.engines.embedded.engine import EmbeddedEngine
from penstock.shared.config import ServiceSettings
from penstock.shared.config.model import ModelConfig
from penstock.shared.models.loading import build_model
from penstock.shared.models.lora import base_parameters
from penstock.shared.protocol.generation import GenRequest, Sampling, Token
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer
from penstock.shared.weights import Staged, WeightReceiver, cleanup, layout_of, open_publisher, open_receiver

JOB, SERVED = "bench", "bench.served"
IDLE, BUSY = "bench.idle", "bench.busy"
"""Where versions are announced, and what the engine is to do meanwhile."""
DEADLINE_S = 60.0
SERVING_GOAL = 2.0
"""Memory copies in whose time a published version is served."""
WARM_UP = 3
"""Versions whose pages are touched for the first time; shown apart."""
VOCABULARY, WIDTH = 512, 1024
SEQUENCES, MAX_LENGTH = 4, 256


class Served(msgspec.Struct, frozen=True):
    """The engine's measurements of one version; times are of the machine's monotonic clock."""

    version: int
    staged: float
    serving: float
    pause_s: float
    gap_s: float


def model(megabytes: int) -> PreTrainedModel:
    """A decoder whose float32 parameters have about ``megabytes``."""
    layer = 4 * WIDTH * WIDTH * (1 + 1 + 2 * 0.25 + 3 * 3)  # q, o, k and v of a quarter of the heads, MLP
    shape = {
        "arch": "qwen3", "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_heads": 16, "num_kv_heads": 4,
        "num_layers": max(1, round(megabytes * 1e6 / layer)),
    }  # fmt: skip
    return build_model(ModelConfig.parse({"config": shape, "tokenizer": "char"}), VOCABULARY, seed=0)


class Serving:
    """An engine that takes every announced version, idle or decoding."""

    def __init__(self, bus: Bus, receiver: WeightReceiver, engine: EmbeddedEngine) -> None:
        self._bus, self._receiver, self._engine = bus, receiver, engine
        self._current: Staged | None = None
        self._decoding: list[asyncio.Task[None]] = []
        self._last, self._gap_s = [0.0] * SEQUENCES, 0.0

    async def take(self, manifest: WeightManifest, *, busy: bool) -> None:
        """Stage, commit, tell."""
        if busy and not self._decoding:
            self._decoding = [asyncio.create_task(self._decode(number)) for number in range(SEQUENCES)]
        self._gap_s = 0.0
        staged = await asyncio.to_thread(self._receiver.stage, manifest)
        staged_at = time.monotonic()
        await self._engine.begin_update(
            version=manifest.version, digest=manifest.digest, mode="swap", guard=staged.intact
        )
        await self._engine.load_chunk(staged.tensors())
        pause_s = await self._engine.commit_update()
        serving = time.monotonic()
        previous, self._current = self._current, staged
        if previous is not None:
            previous.release()
        if busy:  # so that the gap across the swap is over
            before = list(self._last)
            while not self._gap_s or any(last == seen for last, seen in zip(self._last, before, strict=True)):
                await asyncio.sleep(0.001)
        value = np.float32(filling(manifest.version))
        for tensor in staged.tensors().values():
            assert np.float32(tensor.flatten()[0]) == np.float32(tensor.flatten()[-1]) == value
        done = Served(manifest.version, staged_at, serving, pause_s, self._gap_s)
        await self._bus.notify(SERVED, msgspec.msgpack.encode(done))

    async def _decode(self, number: int) -> None:
        sampling = Sampling(max_new_tokens=MAX_LENGTH - 16, min_new_tokens=MAX_LENGTH - 16)
        while True:
            self._last[number] = 0.0
            request = GenRequest(request_id=f"{number}", prompt_ids=[7] * 8, sampling=sampling)
            await self._engine.generate(request, lambda token: self._on_token(number, token))

    def _on_token(self, number: int, token: Token) -> None:
        now = time.monotonic()
        if self._last[number]:
            self._gap_s = max(self._gap_s, now - self._last[number])
        self._last[number] = now


def filling(version: int) -> float:
    """Value of all weights of a version."""
    return version / 1000


async def engine(url: str, shm_dir: str, megabytes: int) -> None:
    """Serve until killed."""
    torch.set_num_threads(1)
    receiver = open_receiver(ServiceSettings(host_id="bench", shm_dir=Path(shm_dir)))
    own = EmbeddedEngine(
        model(megabytes), max_running=SEQUENCES, stop_ids=(), detokenize=lambda ids: "", max_length=MAX_LENGTH
    )
    queue: asyncio.Queue[tuple[WeightManifest, bool]] = asyncio.Queue()

    async with await Bus.connect(url, name="engine") as bus:
        for subject in (IDLE, BUSY):
            await bus.subscribe(subject, lambda at, data: queue.put_nowait((_manifest(data), at == BUSY)))
        await bus.rtt()
        await own.start()
        serving = Serving(bus, receiver, own)
        print("READY", flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                manifest, busy = await queue.get()
                await serving.take(manifest, busy=busy)


def _manifest(data: bytes) -> WeightManifest:
    return msgspec.msgpack.decode(data, type=WeightManifest)


def trainer(args: argparse.Namespace, report: Report) -> None:
    """Publish version after version and wait until each is served."""
    torch.set_num_threads(1)
    with NatsServer() as server, tempfile.TemporaryDirectory(dir=args.shm_dir) as directory:
        command = [sys.executable, __file__, "--engine", server.url, directory, str(args.mb)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                uvloop.run(publish_all(args, report, server.url, Path(directory)))
            finally:
                process.kill()


async def publish_all(args: argparse.Namespace, report: Report, url: str, directory: Path) -> None:
    weights = {name: parameter.data for name, parameter in base_parameters(model(args.mb)).items()}
    layout = layout_of(weights.items())
    settings = ServiceSettings(host_id="bench", shm_dir=directory, data_dir=directory)
    begin = time.monotonic()
    publisher = open_publisher(JOB, layout, settings)
    opened = time.monotonic() - begin
    source, target = np.ones(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    served: asyncio.Queue[Served] = asyncio.Queue()
    rows: dict[str, list[dict[str, float]]] = {IDLE: [], BUSY: []}
    async with await Bus.connect(url, name="trainer") as bus:
        await bus.subscribe(SERVED, lambda _, data: served.put_nowait(msgspec.msgpack.decode(data, type=Served)))
        await bus.rtt()
        for version in range(1, 2 * args.versions + 1):
            subject = IDLE if version <= args.versions else BUSY
            start, copied = await asyncio.to_thread(next_weights, weights, version, source, target)
            begin = time.monotonic()
            manifest = await asyncio.to_thread(publisher.publish, weights.items(), version=version, epoch=1)
            published = time.monotonic()
            await bus.notify(subject, msgspec.msgpack.encode(manifest))
            done = await asyncio.wait_for(served.get(), DEADLINE_S)
            assert done.version == version
            rows[subject].append(
                {
                    "memcpy": copied - start,
                    "published": published - begin,
                    "staged": done.staged - begin,
                    "serving": done.serving - begin,
                    "pause": done.pause_s,
                    "gap": done.gap_s,
                }
            )
    publisher.close()
    cleanup(JOB, settings)
    summarize(report, rows, layout.nbytes, opened)


def next_weights(
    weights: dict[str, Tensor], version: int, source: NDArray[np.uint8], target: NDArray[np.uint8]
) -> tuple[float, float]:
    """Change all weights as an optimizer step would, then copy as many bytes; returns when the copy began and ended."""
    for tensor in weights.values():
        tensor.fill_(filling(version))
    start = time.monotonic()
    np.copyto(target, source)
    return start, time.monotonic()


def summarize(report: Report, rows: dict[str, list[dict[str, float]]], nbytes: int, opened: float) -> None:
    """Fill the report; the first versions map fresh slots and are shown apart."""
    warm, busy = rows[IDLE][WARM_UP:], rows[BUSY]
    usual = float(np.median([row["memcpy"] for row in warm]))
    texts = {
        "memcpy": "one copy of the bytes, warm",
        "published": "trainer blocked (copy and digest)",
        "staged": "staged and verified in the engine",
        "serving": "serving (swapped at a token boundary)",
        "pause": "pause of the engine",
    }
    for key, text in texts.items():
        report.row(text, *_cells(warm, key, usual), f"{rows[IDLE][0][key] * 1e3:.2f}")
    for key in ("serving", "pause", "gap"):
        text = texts.get(key, "gap between two tokens of a sequence")
        report.row(f"while it decodes: {text}", *_cells(busy, key, usual), "")
    report.results = {"bytes": nbytes, "open_s": opened, "idle": rows[IDLE], "busy": rows[BUSY]}
    serving = float(np.median([row["serving"] for row in warm])) / usual
    pause = max(row["pause"] for row in [*rows[IDLE], *busy])
    report.check(f"serving after {serving:.2f} x memcpy (medians), target {SERVING_GOAL:g}", serving <= SERVING_GOAL)
    report.check(f"longest pause of all versions {pause * 1e3:.3f} ms, target 1", pause <= 1e-3)


def _cells(rows: Sequence[dict[str, float]], key: str, memcpy: float) -> list[str]:
    """Best, median and worst in ms; the median in copies."""
    values = sorted(row[key] for row in rows)
    median = float(np.median(values))
    return [*(f"{value * 1e3:.2f}" for value in (values[0], median, values[-1])), f"{median / memcpy:.2f}"]


def main() -> int:
    if sys.argv[1:2] == ["--engine"]:
        uvloop.run(engine(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--mb", type=int, default=500, help="megabytes of weights")
    parser.add_argument("--versions", type=int, default=10, help="for an idle engine, and again for one that decodes")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    report = Report(
        f"Weights, {args.mb} MB of float32, shm",
        ["", "best ms", "median ms", "worst ms", "median x memcpy", "first ms"],
    )
    trainer(args, report)
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
