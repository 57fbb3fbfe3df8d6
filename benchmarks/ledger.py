"""How long a new leader takes to know the state of a long job: the whole ledger, or a snapshot and what followed it.

    python benchmarks/ledger.py [--out results.json] [--updates 10000] [--groups 16] [--kept 500]
                                [--refused 1000000] [--admitted 200000] [--undecided 50000]

A ledger of that many policy updates, two decisions each as on a running job (seal; trained and drawn), a checkpoint
every 50 updates, on a real server with fsync. `--kept` is how many updates EXPERIENCE holds: their groups stand in the
state. `Journal.load` is what a leader runs. Then the same of online jobs that refused or admitted that many items (see
``decided_items.py``). Targets: led again within 5 s with the refused items decided and the others waiting; a feed of
them that was lost is complete again. 0 items: not that one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from decided_items import measure, takeover_with_decisions
from report import Report

from penstock.services.coordinator.training.journal import Journal, read_snapshots
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Event,
    JobStarted,
    SealedGroup,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

JOB = "bench"
CHECKPOINT_EVERY = 50
REPEATS = 3
LED_S = 5.0


def history(updates: int, groups: int, kept: int) -> Iterator[list[Event]]:
    """Decisions of a job, in order."""
    base: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}
    drawn: dict[str, Any] = {"min_version": 0, "deadline": 9.0}
    first = Checkpointed(**base, number=0, version=0, digest="d" * 32, path="/ckpt/0", trainer_epoch=1, low_seq=0)
    yield [JobStarted(**base, config_digest="c"), first, Drawn(**base, start=0, stop=groups, **drawn)]
    for number in range(1, updates + 1):
        start = (number - 1) * groups
        sealed = [
            SealedGroup(Draw(n), "a" * 16, n + 1, "d" * 32, number - 1, number - 1, [0.0] * 8, 512, "rollout-0")
            for n in range(start, start + groups)
        ]
        yield [
            BatchSealed(**base, number=number, revision=1, start_version=number - 1, update_index=number, groups=sealed)
        ]
        events: list[Event] = [
            BatchTrained(**base, number=number, revision=1, version=number, digest="d" * 32, trainer_epoch=1)
        ]
        if number % CHECKPOINT_EVERY == 0:
            low = max(0, number - kept) * groups
            events.append(
                Checkpointed(
                    **base, number=number, version=number, digest="d" * 32, path=f"/ckpt/{number}",
                    trainer_epoch=1, low_seq=low,
                )
            )  # fmt: skip
        yield [*events, Drawn(**base, start=start + groups, stop=start + 2 * groups, **drawn)]


async def load_seconds(bus: Bus) -> tuple[float, LedgerState]:
    """Best of a few loads, and what was loaded."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        state = await Journal(bus, JOB).load()
        best = min(best, time.perf_counter() - began)
    return best, state


async def main(arguments: argparse.Namespace) -> int:
    report = Report("A leader's start", ["ledger", "entries", "MiB", "load s"])
    if arguments.updates:
        await long_job(report, arguments)
    if arguments.refused or arguments.admitted:
        await online_jobs(report, arguments)
    return report.finish(arguments.out)


async def online_jobs(report: Report, arguments: argparse.Namespace) -> None:
    """Jobs with very many decided live items."""
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory) / "nats") as server:
        async with await Bus.connect(server.url, name="bench") as bus:
            await bus.ensure_streams(experience_bytes=1 << 30, stream_bytes=2 << 30)
            for kind, items in (("refused", arguments.refused), ("admitted", arguments.admitted)):
                if not items:
                    continue
                found = await measure(bus, f"job_{kind}", kind, items)
                report.row(
                    f"{items} {kind}, whole: {found.bytes_per_item:.1f} B an item", str(found.entries),
                    f"{found.ledger_mib:.1f}", f"{found.fold_s:.3f} ({found.cpu_s:.2f} CPU)",
                )  # fmt: skip
                report.row(
                    f"snapshot, {found.kept} of them named", "", f"{found.snapshot_mib:.2f}", f"{found.load_s:.3f}"
                )
                report.results |= {kind: asdict(found)}
            if arguments.refused:
                led = await takeover_with_decisions(bus, "job_refused", arguments.undecided, arguments.refused)
                report.row(
                    f"takeover, {led.decided} decided, {led.undecided} wait", "", "",
                    f"{led.seconds:.3f} ({led.cpu_s:.2f} CPU)",
                )  # fmt: skip
                report.row(
                    f"feed rebuilt, {led.feed_statuses} statuses",
                    "",
                    "",
                    f"{led.feed_s:.3f} ({led.feed_cpu_s:.2f} CPU)",
                )
                report.check(f"led again within {LED_S:g} s", led.seconds <= LED_S)
                report.check("the feed is complete", led.feed_statuses == arguments.refused)
                report.results |= {"takeover": asdict(led)}


async def long_job(report: Report, arguments: argparse.Namespace) -> None:
    """A job with very many updates."""
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory) / "nats") as server:
        async with await Bus.connect(server.url, name="bench") as bus:
            await bus.ensure_streams(experience_bytes=1 << 30, stream_bytes=1 << 30)
            journal, state, longest = Journal(bus, JOB), LedgerState(), 0.0
            began = time.perf_counter()
            for events in history(arguments.updates, arguments.groups, arguments.kept):
                await journal.append(events)
                fold(events, state)
                at = time.perf_counter()
                write = journal.snapshot(state)
                longest = max(longest, time.perf_counter() - at)
                if write is not None:
                    await write()
            written = time.perf_counter() - began
            snapshots = await read_snapshots(bus, JOB)
            with_snapshot, fast = await load_seconds(bus)
            await bus.purge(subjects.SNAPSHOTS, subjects.snapshots(JOB))
            without, slow = await load_seconds(bus)
            entries = await bus.read(subjects.LEDGER, subjects.ledger(JOB))
    tail = sum(1 for message in entries if message.seq > snapshots[0][0].seq)
    size = sum(len(message.data) for message in entries) / 2**20
    report.row("whole", str(len(entries)), f"{size:.1f}", f"{without:.3f}")
    report.row("snapshot and tail", str(tail), f"{snapshots[0][2] / 2**20:.2f}", f"{with_snapshot:.3f}")
    report.check("both give the same state", fast == slow == state)
    report.check("a snapshot holds the leader up for less than 5 ms", longest < 0.005)
    report.results |= {
        "updates": arguments.updates, "entries": len(entries), "ledger_mib": size, "load_s": without,
        "snapshot_mib": snapshots[0][2] / 2**20, "snapshot_load_s": with_snapshot, "tail_entries": tail,
        "hold_up_s": longest, "written_s": written,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--kept", type=int, default=500)
    parser.add_argument("--refused", type=int, default=1_000_000)
    parser.add_argument("--admitted", type=int, default=200_000)
    parser.add_argument("--undecided", type=int, default=50_000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(parser.parse_args())))
