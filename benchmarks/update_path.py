"""Time a strictly on-policy update waits for the bus: from the end of scoring until the trainer has the whole batch.

    python benchmarks/update_path.py [--out results.json] [--updates 200] [--groups 16]

A real server with fsync, three connections, the trainer's in a process of its own. Only the last group of a batch and
what follows it are on the path: the group is stored, the coordinator reads its header, the seal is stored in the
ledger, the manifest is stored, the trainer reads it, fetches all groups and checks them. With ``max_lag`` of 1 or more
all of that happens during the update before. ``recorded`` is the other end: the trainer's report of the update is
stored in the ledger before engines hear of its weights. The slot is written first, for the report holds its digest.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop
from report import Report as Table

from penstock.services.coordinator.training.journal import Journal
from penstock.services.rollout.publisher import GroupPublisher
from penstock.services.trainer.batch.inputs import BatchInputs, completions
from penstock.services.trainer.reports import Reporter
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import BatchSealed, BatchTrained, SealedGroup
from penstock.shared.protocol.ids import Draw, new_attempt
from penstock.shared.protocol.messages import Ack, BatchManifest, Report
from penstock.shared.protocol.trajectory import GROUP_HEADER, Group, parse_group_header
from penstock.shared.transport.bus import Bus, Message
from penstock.shared.transport.server import NatsServer

JOB = "bench"
TARGET_S = 0.010
WARM_UP = 10


class Size(NamedTuple):
    """Of a group."""

    completions: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.completions} x {self.tokens:,} tokens"


SIZES = (Size(8, 64), Size(8, 1024), Size(16, 4096))


class Times(NamedTuple):
    """Seconds from one point of the path to the next."""

    stored: float
    read: float
    sealed: float
    announced: float
    fetched: float
    recorded: float


def group_of(ordinal: int, size: Size) -> Group:
    """A scored group of random tokens, sampled by version 0."""
    rng, total = np.random.default_rng(ordinal), size.completions * size.tokens
    return Group(
        job=JOB, draw=Draw(ordinal), attempt=new_attempt(), epoch=1, meta={"worker": "bench"},
        prompt_ids=np.arange(100, dtype=np.int32), token_ids=rng.integers(0, 100_000, total, dtype=np.int32),
        cu_seqlens=np.arange(0, total + 1, size.tokens, dtype=np.int32), logprobs=-rng.random(total, dtype=np.float32),
        mask=np.ones(total, np.uint8), rewards=rng.random(size.completions, dtype=np.float32),
        failed=np.zeros(size.completions, np.bool_), finish=np.zeros(size.completions, np.uint8),
        spans=np.asarray([[i, 0, 0, size.tokens] for i in range(size.completions)], np.int32),
    )  # fmt: skip


def fetch_all(url: str, updates: int, pipe: Connection) -> None:
    """The trainer's process: says when it has each batch, in seconds of the machine's monotonic clock."""

    async def run() -> None:
        async with await Bus.connect(url, name="trainer") as bus:
            inputs = BatchInputs(
                bus, JOB, lambda manifest: range(len(manifest.groups)), max_lag=0,
                decode=partial(completions, temperature=1.0), last_trained=0,
            )  # fmt: skip
            following = asyncio.create_task(inputs.run())
            pipe.send("ready")
            for number in range(1, updates + 1):
                while (manifest := inputs.peek(number)) is None:
                    inputs.arrived.clear()
                    await asyncio.wait_for(inputs.arrived.wait(), 60)
                await inputs.shard(manifest)
                pipe.send(time.monotonic())
                inputs.trained(manifest)
            following.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def updates_of(size: Size, args: argparse.Namespace) -> list[Times]:
    """One time of each stage for every update."""
    context, number = multiprocessing.get_context("spawn"), args.updates + WARM_UP
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory) / "nats") as server:
        async with (
            await Bus.connect(server.url, name="rollout") as worker,
            await Bus.connect(server.url, name="coordinator") as leader,
        ):
            await leader.ensure_streams(experience_bytes=8 << 30, stream_bytes=256 << 20)
            process = context.Process(target=fetch_all, args=(server.url, number, there), daemon=True)
            process.start()
            await asyncio.to_thread(here.recv)
            publisher, journal = GroupPublisher(worker, JOB), Journal(leader, JOB)
            await journal.load()
            publishing = asyncio.create_task(publisher.run())
            found, draws = [], iter(range(args.groups * number))
            reporter, taking = (
                Reporter(worker, JOB),
                await leader.serve(subjects.report(JOB), partial(_record, journal)),
            )
            headers = leader.follow(subjects.EXPERIENCE, subjects.experience(JOB), headers_only=True)
            async with aclosing(headers):
                for update in range(1, number + 1):
                    groups = [group_of(next(draws), size) for _ in range(args.groups)]
                    batch = [await _publish(group, publisher, headers) for group in groups]
                    times = await _seal(update, batch, leader, journal, here)
                    began = time.monotonic()
                    await reporter.ask(Report(kind="trained", epoch=1, batch=update, version=update, digest="0" * 32))
                    found.append(times._replace(recorded=time.monotonic() - began))
                    await leader.purge(subjects.EXPERIENCE, subjects.experience(JOB), below_seq=batch[-1][0].seq)
            publishing.cancel()
            await taking.close(1)
            process.join(10)
    return found[WARM_UP:]


async def _record(journal: Journal, data: bytes) -> bytes:
    """The coordinator's part: the event is on disk, then the trainer hears so."""
    report, _ = unpack(data, Report)
    trained = BatchTrained(
        writer_epoch=1, time=0.0, number=report.batch, revision=1, version=report.version, digest=report.digest,
        trainer_epoch=1,
    )  # fmt: skip
    await journal.append([trained])
    return pack(Ack(ok=True), job=JOB, epoch=1)


async def _publish(
    group: Group, publisher: GroupPublisher, read: AsyncIterator[Message]
) -> tuple[SealedGroup, float, float]:
    """One group, as it stands in a batch; seconds until it is stored, and until the coordinator knows it."""
    began = time.monotonic()
    await publisher.publish(group)
    stored = time.monotonic()
    while GROUP_HEADER not in (message := await anext(read)).headers:  # the parts of a large one follow it
        continue
    header = parse_group_header(message.headers)
    known = SealedGroup(
        header.draw, header.attempt, message.seq, header.digest, header.min_version, header.max_version,
        header.rewards, sum(header.lengths), header.worker,
    )  # fmt: skip
    return known, stored - began, time.monotonic() - stored


async def _seal(
    number: int, batch: list[tuple[SealedGroup, float, float]], leader: Bus, journal: Journal, trainer: Connection
) -> Times:
    groups = [group for group, _, _ in batch]
    began = time.monotonic()
    await journal.append(
        [
            BatchSealed(
                writer_epoch=1, time=0.0, number=number, revision=1, start_version=0, update_index=number, groups=groups
            )
        ]
    )
    sealed = time.monotonic()
    manifest = BatchManifest(number=number, revision=1, start_version=0, update_index=number, groups=groups)
    await leader.publish(subjects.batches(JOB), pack(manifest, job=JOB, id=f"{number}.1", epoch=1))
    announced = time.monotonic()
    fetched = await asyncio.to_thread(trainer.recv)
    return Times(*batch[-1][1:], sealed - began, announced - sealed, max(0.0, fetched - announced), 0.0)


def main() -> int:
    """Command line; the exit status is 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--groups", type=int, default=16)
    args = parser.parse_args()
    report = Table(
        f"The bus on the path of an update, {args.groups} groups: medians, ms",
        ["group", *Times._fields, "together", "p99"],
    )
    for size in SIZES:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(updates_of(size, args))
        whole = [sum(times) for times in found]
        stages = {name: statistics.median(getattr(times, name) for times in found) for name in Times._fields}
        together, worst = statistics.median(whole), statistics.quantiles(whole, n=100)[98]
        report.row(str(size), *(f"{1e3 * value:.2f}" for value in (*stages.values(), together, worst)))
        report.results[str(size)] = {**stages, "together": together, "p99": worst}
        if size.tokens <= 1024:
            report.check(f"{size}: {1e3 * together:.1f} ms, target {1e3 * TARGET_S:g}", together <= TARGET_S)
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
