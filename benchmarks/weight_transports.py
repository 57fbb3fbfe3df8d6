"""Every transport of weights between two processes of this machine, beside one memory copy and one raw socket.

    python benchmarks/weight_transports.py [--mb 100 500 2000] [--versions 5] [--out transports.json]
    python benchmarks/weight_transports.py --mb 200 --changed 0 2 10 25 100

A trainer publishes versions; receivers in other processes stage and verify them. `blocked` is how long the trainer is
held up by the publication, `staged` the time from there on until every receiver has the version, `in all` the time from
the beginning of the publication until then. shm: a receiver on the
trainer's host. tcp, gloo: one on another host, over the loopback address; "tcp, 3 receivers": three on one other host,
which share one transfer. disk: through files. cuda_ipc, only where there is a GPU and cupy: a receiver on the trainer's
GPU, whose `staging` is compared with a copy of the weights within the GPU; this part has not run yet. The raw socket
sends as many bytes to another process over the loopback address, and is answered when all are there.

--changed measures tcp only, with as many bytes of bfloat16, of which a share of elements changes between two versions:
whole versions, and their changes (PENSTOCK_WEIGHT_DELTAS).

A version is counted in memory copies from the beginning of its publication. The raw socket has no publication: `of raw
socket` compares it with `staged`.

Goals: for shm, the trainer's wait and the copies in all; the share of the raw socket; for tcp, one transfer of each
version to each host; for changes of at most 5 % of the elements, the bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from report import Report
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.protocol.weights import WeightRoutes
from penstock.shared.weights import cleanup, device_memory, layout_of, open_publisher, open_receiver

JOB = "bench"
PIECE_MB = 50
"""Size of one parameter."""
WARM_UP = 2
"""First versions, whose memory is mapped anew; left out of the medians."""
DEADLINE_S = 300.0
BLOCKED_GOAL, SHM_GOAL, TCP_GOAL, GLOO_GOAL, CUDA_IPC_GOAL = 1.5, 2.0, 0.5, 0.4, 0.8
"""Times a memory copy, blocked and in all; shares of the bytes per second of the raw socket, and of a copy within a
GPU."""
CHANGES_GOAL = 0.1
"""Share of the bytes of a version that its changes have, if at most 5 % of the elements changed."""
_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Way:
    """One transport. ``host``: host of the receivers, that of the trainer is 'near'."""

    name: str
    transport: Literal["shm", "tcp", "gloo", "disk", "cuda_ipc"]
    host: str
    num_receivers: int = 1
    deltas: bool = False


WAYS = (
    Way("shm", "shm", "near"), Way("tcp", "tcp", "far"), Way("tcp, 3 receivers", "tcp", "far", 3),
    Way("gloo", "gloo", "far"), Way("disk", "disk", "far"), Way("cuda_ipc", "cuda_ipc", "near"),
)  # fmt: skip


def settings_of(way: Way, directory: Path, name: str, host: str) -> ServiceSettings:
    """Settings of a process; each host has a directory for shared memory of its own."""
    shm = directory / host
    shm.mkdir(exist_ok=True)
    return ServiceSettings(
        host_id=host, worker_id=name, shm_dir=shm, weight_disk=directory if way.transport == "disk" else None,
        bulk_host="127.0.0.1" if name == "trainer" and way.transport in ("tcp", "gloo") else "",
        weight_collective="gloo" if way.transport == "gloo" else "", weight_cuda_ipc=way.transport == "cuda_ipc",
        weight_deltas=way.deltas,
    )  # fmt: skip


def receive(way: Way, directory: Path, name: str, pipe: Connection) -> None:
    """Stage what is announced until the pipe is closed; answer with the time, the transport, the fetched bytes and the
    seconds of staging."""
    torch.set_num_threads(1)
    settings = settings_of(way, directory, name, way.host)
    receiver = open_receiver(settings, memory=device_memory(settings))
    if way.transport == "gloo":
        receiver.follow(name, WeightRoutes(epoch=1, transports={name: "gloo"}))
    pipe.send("ready")
    staged = None
    while (manifest := pipe.recv()) is not None:
        start = time.monotonic()
        before, staged = staged, receiver.stage(manifest)
        end = time.monotonic()
        pipe.send((end, staged.way.transport, staged.way.fetched_bytes, end - start))
        if before is not None:
            before.release()
    if staged is not None:
        staged.release()
    receiver.close()


def swallow(port: int, nbytes: int, rounds: int) -> None:
    """Other end of the raw socket."""
    buffer = bytearray(nbytes)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(rounds):
            view = memoryview(buffer)
            while view:
                view = view[connection.recv_into(view) :]
            connection.sendall(b"!")


def raw_socket_s(data: NDArray[np.uint8], rounds: int) -> float:
    """Median seconds of one transfer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = _spawn.Process(target=swallow, args=(server.getsockname()[1], data.nbytes, rounds + 1))
        process.start()
        connection, _ = server.accept()

        def send() -> None:
            connection.sendall(data.data)
            connection.recv(1)

        with connection:
            return timed(send, rounds)


def timed(work: Callable[[], Any], rounds: int) -> float:
    """Median seconds of ``work``, after one round for warmth."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.monotonic()
        work()
        seconds.append(time.monotonic() - start)
    return median(seconds[1:])


def baselines(nbytes: int, rounds: int) -> tuple[float, float]:
    """Median seconds of one memory copy and of one transfer over the raw socket."""
    source, target = (np.ones(nbytes, np.uint8) for _ in range(2))
    return timed(lambda: np.copyto(target, source), rounds), raw_socket_s(source, rounds)


def device_copy_s(weights: dict[str, Tensor], rounds: int) -> float:
    """Median seconds of one copy of the weights within the GPU."""
    source = torch.empty(sum(tensor.nbytes for tensor in weights.values()), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return timed(copy, rounds)


def has_gpu() -> bool:
    """True if `cuda_ipc` can be measured here."""
    return torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None


def refill(weights: dict[str, Tensor], version: int) -> None:
    """Give every weight another value."""
    for tensor in weights.values():
        tensor.fill_(version)


def change(percent: float) -> Callable[[dict[str, Tensor], int], None]:
    """Return a function that changes the last bit of a random share of all bfloat16 weights."""
    generator = torch.Generator().manual_seed(0)

    def flip(weights: dict[str, Tensor], version: int) -> None:
        for tensor in weights.values():
            bits = tensor.view(torch.int16)
            bits ^= (torch.rand(bits.shape, generator=generator) < percent / 100).to(torch.int16)

    return flip


def measure(
    way: Way, weights: dict[str, Tensor], versions: int, parent: Path,
    update: Callable[[dict[str, Tensor], int], None] = refill,
) -> list[dict[str, float]]:  # fmt: skip
    """Publish versions, each after an ``update`` of the weights, and wait until each is staged everywhere.

    Raises:
        AssertionError: a version came by another transport.
    """
    with tempfile.TemporaryDirectory(dir=parent) as name, ExitStack() as stack:
        directory, rows = Path(name), []
        layout, own = layout_of(weights.items()), settings_of(way, directory, "trainer", "near")
        host: Literal["disk", "shm"] = "disk" if way.transport == "disk" else "shm"
        publisher = open_publisher(JOB, layout, own, transports=(host,), memory=device_memory(own))
        stack.callback(cleanup, JOB, own)
        stack.callback(publisher.close)
        names = [f"rollout-{number}" for number in range(way.num_receivers)]
        if way.transport == "gloo":
            publisher.open(layout, names, 1)
        pipes = []
        for receiver in names:
            pipe, theirs = _spawn.Pipe()
            process = _spawn.Process(target=receive, args=(way, directory, receiver, theirs), daemon=True)
            process.start()
            stack.callback(process.join, 30)
            stack.callback(pipe.send, None)
            assert pipe.poll(DEADLINE_S), "a receiver does not start"
            pipe.recv()
            pipes.append(pipe)
        for version in range(1, versions + WARM_UP + 1):
            update(weights, version)
            start = time.monotonic()
            manifest = publisher.publish(weights.items(), version=version, epoch=1)
            published = time.monotonic()
            for pipe in pipes:
                pipe.send(manifest)
            assert all(pipe.poll(DEADLINE_S) for pipe in pipes), f"version {version} is not staged"
            answers = [pipe.recv() for pipe in pipes]
            assert {transport for _, transport, *_ in answers} == {way.transport}, answers
            transfers = sum(nbytes for _, _, nbytes, _ in answers) / layout.nbytes
            staging = max(seconds for *_, seconds in answers)
            staged = max(at for at, *_ in answers) - published
            blocked = published - start
            rows.append({"blocked": blocked, "staged": staged, "staging": staging, "transfers": transfers})
        return rows[WARM_UP:]


def add(report: Report, megabytes: int, versions: int, parent: Path) -> None:
    """Rows and checks of one size."""
    pieces = max(1, round(megabytes / PIECE_MB))
    weights = {f"w{number}": torch.zeros(megabytes * 1_000_000 // pieces // 4) for number in range(pieces)}
    copy_s, raw_s = baselines(megabytes * 1_000_000, versions)
    results: dict[str, Any] = {"memcpy_s": copy_s, "raw_socket_s": raw_s}
    report.row(f"{megabytes} MB: one memory copy", "", "", f"{copy_s * 1e3:.0f}", "1.00", f"{raw_s / copy_s:.2f}")
    report.row(f"{megabytes} MB: raw socket", "", "", f"{raw_s * 1e3:.0f}", f"{raw_s / copy_s:.2f}", "1.00")
    for way in WAYS:
        if way.transport == "cuda_ipc":
            if not has_gpu():
                continue
            weights = {name: tensor.to("cuda") for name, tensor in weights.items()}
        rows = results[way.name] = measure(way, weights, versions, parent)
        blocked, staged = (median(row[key] for row in rows) for key in ("blocked", "staged"))
        in_all = median(row["blocked"] + row["staged"] for row in rows)
        share = raw_s / staged
        report.row(
            f"{megabytes} MB: {way.name}", f"{blocked * 1e3:.0f}", f"{staged * 1e3:.0f}", f"{in_all * 1e3:.0f}",
            f"{in_all / copy_s:.2f}", f"{share:.2f}",
        )  # fmt: skip
        if way.transport == "shm":
            text = f"{megabytes} MB, {way.name}: trainer blocked for {blocked / copy_s:.2f} copies"
            report.check(f"{text}, goal {BLOCKED_GOAL}", blocked <= BLOCKED_GOAL * copy_s)
            text = f"{megabytes} MB, {way.name}: staged {in_all / copy_s:.2f} copies after the publication began"
            report.check(f"{text}, goal {SHM_GOAL:g}", in_all <= SHM_GOAL * copy_s)
        if way.transport == "tcp":
            most, least = (choose(row["transfers"] for row in rows) for choose in (max, min))
            text = f"{megabytes} MB, {way.name}: {least:g} to {most:g} transfers of a version to the host"
            report.check(f"{text}, goal 1", least == most == 1)
        if way.transport in ("tcp", "gloo") and way.num_receivers == 1:
            goal = TCP_GOAL if way.transport == "tcp" else GLOO_GOAL
            report.check(f"{megabytes} MB, {way.name}: {share:.2f} of a raw socket, goal {goal}", share >= goal)
        if way.transport == "cuda_ipc":
            results["device_copy_s"] = device_s = device_copy_s(weights, versions)
            share = device_s / median(row["staging"] for row in rows)
            text = f"{megabytes} MB, {way.name}: {share:.2f} of a copy within the GPU"
            report.check(f"{text}, goal {CUDA_IPC_GOAL}", share >= CUDA_IPC_GOAL)
    report.results[str(megabytes)] = results


def add_changes(report: Report, megabytes: int, percents: list[float], versions: int, parent: Path) -> None:
    """Rows of whole versions and of changes over tcp, for each share of changed weights."""
    pieces, nbytes = max(1, round(megabytes / PIECE_MB)), megabytes * 1_000_000
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"w{number}": (0.02 * torch.randn(nbytes // pieces // 2, generator=generator)).to(torch.bfloat16)
        for number in range(pieces)
    }
    copy_s, raw_s = baselines(nbytes, versions)
    results: dict[str, Any] = {"memcpy_s": copy_s, "raw_socket_s": raw_s}
    for percent in percents:
        for deltas in (False, True):
            name = f"tcp, {percent:g} % changed, {'changes' if deltas else 'whole'}"
            rows = measure(Way(name, "tcp", "far", deltas=deltas), weights, versions, parent, change(percent))
            results[name] = rows
            blocked, staged, sent = (median(row[key] for row in rows) for key in ("blocked", "staged", "transfers"))
            report.row(
                f"{megabytes} MB: {name}, {sent * megabytes:.2f} MB sent", f"{blocked * 1e3:.0f}",
                f"{staged * 1e3:.0f}", f"{(blocked + staged) * 1e3:.0f}", f"{(blocked + staged) / copy_s:.2f}",
                f"{raw_s / staged:.2f}",
            )  # fmt: skip
            if deltas and percent <= 5:
                report.check(f"{name}: {sent:.4f} of the bytes, goal {CHANGES_GOAL:g}", sent <= CHANGES_GOAL)
    report.results[f"{megabytes} MB, changes"] = results


def main() -> int:
    """Command line; the exit status is 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", nargs="+", type=int, default=[100, 500, 2000], help="megabytes of weights")
    parser.add_argument("--versions", type=int, default=5, help=f"measured, after {WARM_UP} others")
    parser.add_argument("--changed", nargs="+", type=float, help="percent of bfloat16 weights that a version changes")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, help="write the results as JSON, after each size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(
        f"Transports of weights, {'bfloat16' if args.changed else 'float32'}, processes of one machine",
        ["", "blocked ms", "staged ms", "in all ms", "x memcpy", "of raw socket"],
    )
    for megabytes in args.mb:
        if args.changed:
            add_changes(report, megabytes, args.changed, args.versions, args.shm_dir)
        else:
            add(report, megabytes, args.versions, args.shm_dir)
        report.write(args.out)
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
