"""A job with many kept groups, a takeover of it, and decisions on thousands of groups, for ``takeover.py``.

The groups are all trained and none is given up yet: a ledger with snapshots, and their headers in EXPERIENCE, on a real
server with fsync. A coordinator starts in a process of its own; it leads once the tickets of what is in flight are
there. It is watched for ten seconds more.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.service import CoordinatorService
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
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
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import GroupHeader, group_headers
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.server import NatsServer

JOB, GROUP, NBYTES = "job_bench", 8, 20_000
DEADLINE_S, WATCHED_S = 600.0, 10.0
BASE: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}


def config_of(per_batch: int, max_lag: int = 0) -> JobConfig:
    return JobConfig.parse(
        {
            "name": "bench",
            "model": {"config": {}, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "algorithm": {"group_size": GROUP},
            "sampling": {"max_new_tokens": 16},
            "limits": {"byte_budget": 1 << 40},
            "train": {"batch_size": per_batch * GROUP, "max_updates": 1_000_000, "max_lag": max_lag},
        }
    )


# -- a job with many kept groups -------------------------------------------------------------------------------------


def history(updates: int, per_batch: int) -> Iterator[list[Event]]:
    """Decisions of the job, in order; the group of the n-th draw is message n + 1 of EXPERIENCE."""
    drawn: dict[str, Any] = {"min_version": 0, "deadline": time.time() + 86_400}
    first = Checkpointed(**BASE, number=0, version=0, digest="d" * 32, path="0", trainer_epoch=1, low_seq=0)
    yield [JobStarted(**BASE, config_digest="c"), first, Drawn(**BASE, start=0, stop=per_batch, **drawn)]
    for number in range(1, updates + 1):
        start = (number - 1) * per_batch
        sealed = [
            SealedGroup(
                draw=Draw(n), attempt="a" * 16, seq=n + 1, digest="d" * 32, min_version=number - 1,
                max_version=number - 1, rewards=[0.0] * GROUP, tokens=512, worker="rollout-0", nbytes=NBYTES,
            )
            for n in range(start, start + per_batch)
        ]  # fmt: skip
        about: dict[str, Any] = {**BASE, "number": number, "revision": 1}
        yield [BatchSealed(**about, start_version=number - 1, update_index=number - 1, groups=sealed)]
        drawn["min_version"] = number
        yield [
            BatchTrained(**about, version=number, digest="d" * 32, trainer_epoch=1),
            Drawn(**BASE, start=start + per_batch, stop=start + 2 * per_batch, **drawn),
        ]


def header_of(draw: Draw, version: int) -> GroupHeader:
    return GroupHeader(
        draw=draw, attempt="a" * 16, epoch=1, digest="d" * 32, nbytes=NBYTES, prompt_tokens=16, lengths=[16] * GROUP,
        rewards=[0.0, 1.0] * (GROUP // 2), failed=[False] * GROUP, truncated=[False] * GROUP, finite=True,
        min_version=version, max_version=version, worker="rollout-0", temperature=1.0,
    )  # fmt: skip


async def make_job(bus: Bus, updates: int, per_batch: int) -> None:
    """The ledger with its snapshots, and the groups."""
    subject, journal, state = subjects.experience(JOB), Journal(bus, JOB), LedgerState()
    for start in range(0, updates * per_batch, 1000):
        stop = min(start + 1000, updates * per_batch)
        headers = [group_headers(header_of(Draw(n), n // per_batch)) for n in range(start, stop)]
        await bus.publish_many([Outgoing(subject, b"body", header) for header in headers], deadline_s=60)
    await journal.load()
    for events in history(updates, per_batch):
        await journal.append(events)
        fold(events, state)
        if (write := journal.snapshot(state)) is not None:
            await write()
    await JobStore(bus).create(config_of(per_batch), JOB)


async def takeover(groups: int, per_batch: int) -> Led:
    """With so many kept groups."""
    updates = groups // per_batch
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory) / "nats") as server:
        async with await Bus.connect(server.url, name="bench") as bus:
            await bus.ensure_streams(experience_bytes=1 << 30, stream_bytes=1 << 30)
            await make_job(bus, updates, per_batch)
            return await _take_over(bus, server.url, Path(directory), groups=updates * per_batch, tickets=per_batch)


# -- a takeover ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Led:
    """Seconds from the start of the process to the first ticket; the longest hold-up of its event loop, while it began
    and in all; the most memory that it had; the epoch of its lease at the end, 1: it was never lost."""

    groups: int
    seconds: float
    first_lag_s: float
    lag_s: float
    rss_mib: float
    epoch: int


async def _take_over(bus: Bus, url: str, directory: Path, *, groups: int, tickets: int) -> Led:
    """Start a coordinator and wait until it has led for a while."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, url, str(directory), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (await bus.stream_state(subjects.TICKETS)).messages < tickets:
                await asyncio.sleep(0.02)
            seconds = time.perf_counter() - began
            found = json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return Led(groups=groups, seconds=seconds, **found)


async def lead(url: str, directory: Path) -> None:
    """The coordinator: lead, and print what was measured once it has led for WATCHED_S."""
    lag, settings = (
        0.0,
        ServiceSettings(data_dir=directory / "data", nats_url=url, worker_id="bench", open_loopback=True),
    )
    settings.data_dir.mkdir(exist_ok=True)
    gc.freeze()  # as ``run_service`` does: else a full collection goes through all that was imported

    async def watch() -> None:
        nonlocal lag
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            lag = max(lag, time.perf_counter() - before - 0.005)

    async with await Bus.connect(url, name="coordinator") as bus, asyncio.TaskGroup() as tasks:
        service = CoordinatorService(bus, settings)
        running = [tasks.create_task(watch()), tasks.create_task(service._lead_forever())]
        while not any(runner.ready for runner in service.runners.values()):
            await asyncio.sleep(0.01)
        led_lag = lag
        await asyncio.sleep(WATCHED_S)
        epoch = json.loads((await bus.kv(subjects.LEASES).get("coordinator")).value)["epoch"]  # type: ignore[union-attr, arg-type]
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"first_lag_s": led_lag, "lag_s": lag, "rss_mib": rss, "epoch": epoch}), flush=True)
        for task in running:
            task.cancel()


# -- decisions -------------------------------------------------------------------------------------------------------


def sealing_seconds(per_batch: int = 2048, max_lag: int = 8) -> float:
    """CPU seconds of the decisions that seal all batches that the lag bound allows."""
    run = JobRun(config_of(per_batch, max_lag), LedgerState(), num_ordinals=None, writer_epoch=1)
    run.commit(run.decide(Inputs(0.0)))
    first = Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="p")
    run.commit(run.on_report(first, Inputs(0.0)))
    run.commit(run.decide(Inputs(0.0)))
    for seq, draw in enumerate(sorted(run.state.open), 1):
        run.on_group(seq, header_of(draw, 0))
    spent = 0.0
    while True:
        began = time.thread_time()
        events = run.decide(Inputs(0.0))
        spent += time.thread_time() - began
        if not events:
            return spent
        run.commit(events)


if __name__ == "__main__":  # the coordinator of a takeover
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lead(sys.argv[1], Path(sys.argv[2])))
