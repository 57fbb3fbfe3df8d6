"""A leader whose streams are full waits, reports the reason, and continues once there is room; nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.effects import EffectPublisher
from penstock.services.coordinator.leader.leader_rpc import LeaderRpc
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.service import CoordinatorService
from penstock.services.coordinator.services import Services
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.run import Effects, JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import NoRoom, StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import BatchSealed, Checkpointed, Drawn, Event, JobStarted, decode_events
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ack, Report, Ticket
from penstock.shared.runtime import metrics
from penstock.shared.runtime.ledger import ledger_archive
from penstock.shared.transport.bus import Bus

SPEC: dict[str, Any] = {
    "name": "blocked",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 1},
}
CONFIG = JobConfig.parse(SPEC)
BASE: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}
START: list[Event] = [
    JobStarted(**BASE, config_digest="c"),
    Checkpointed(**BASE, number=0, version=0, digest="w", path="/gone", trainer_epoch=1, low_seq=0),
    Drawn(**BASE, start=0, stop=2, min_version=0, deadline=time.time() + 600),
]


def junk(stream: str) -> str:
    return f"{stream.lower()}.job_junk"


@pytest.fixture
async def small(bus: Bus) -> Bus:
    """A bus with streams of 1 MiB."""
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=1 << 20)
    return bus


async def fill(bus: Bus, stream: str) -> None:
    """Publish until a stream refuses even a message of one byte."""
    for nbytes in (1 << 16, 1 << 10, 1):
        with contextlib.suppress(StreamFull):
            while True:
                await bus.publish(junk(stream), b"x" * nbytes)


async def until(holds: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (found := holds()):
            await asyncio.sleep(0.02)
    return found


def blocked_seconds(stream: str) -> float:
    name = f'penstock_coordinator_blocked_seconds_total{{stream="{stream.lower()}"}}'
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


async def check_waits(bus: Bus, stream: str, retry: Retry, work: Awaitable[Any]) -> None:
    """Check that ``work`` waits while ``stream`` is full, that the wait has an age, and that new room ends it."""
    await fill(bus, stream)
    before, began, task = blocked_seconds(stream), time.time(), asyncio.ensure_future(work)
    first = await until(lambda: retry.blocked)
    assert f"stream {stream} is full" in first.why
    await asyncio.sleep(0.5)
    assert retry.blocked is not None
    assert retry.blocked.since == first.since == pytest.approx(began, abs=0.3), (
        "the age does not start anew with each attempt"
    )
    assert not task.done()
    assert blocked_seconds(stream) > before
    await bus.purge(stream, junk(stream))
    await asyncio.wait_for(task, 30)
    assert retry.blocked is None


async def test_an_entry_waits_for_room_in_the_ledger(small: Bus, caplog: pytest.LogCaptureFixture) -> None:
    messages: list[str] = []
    journal = Journal(small, "job_a", Retry("job_a", messages.append))
    await journal.load()
    await journal.append(START[:1])
    await check_waits(small, subjects.LEDGER, journal.retry, journal.append(START[1:]))
    assert [len(decode_events(m.data)) for m in await small.read(subjects.LEDGER, subjects.ledger("job_a"))] == [1, 2]
    assert len(messages) == 1, "one warning for all attempts"
    assert "an entry of the ledger must wait: stream LEDGER is full" in messages[0]
    assert "job_a: an entry of the ledger waits" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("stream", [subjects.TICKETS, subjects.BATCHES])
async def test_tickets_and_manifests_wait_for_room(small: Bus, stream: str) -> None:
    publisher = EffectPublisher(small, "job_a", epoch=1)
    sealed = BatchSealed(**BASE, number=1, revision=1, start_version=0, update_index=0, groups=[])
    run = JobRun(CONFIG, LedgerState(sealed={1: sealed}), num_ordinals=None, writer_epoch=1)
    ticket = Ticket(draw=Draw(0), min_version=0, deadline=time.time() + 60, epoch=1)
    tickets = stream == subjects.TICKETS
    work = publisher.publish_tickets([ticket] * 2) if tickets else publisher.publish(run, Effects(announce=[1]))
    await check_waits(small, stream, publisher.retry, work)
    subject = subjects.tickets("job_a") if tickets else subjects.batches("job_a")
    assert subject in await small.subject_counts(stream)


@asynccontextmanager
async def led(bus: Bus, directory: Path) -> AsyncIterator[tuple[JobRunner, LeaderRpc]]:
    """Run a leader; yield it and the RPC that answers why its job waits."""
    record = await JobStore(bus).create(CONFIG, "job_a")
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=directory)
    leading = asyncio.create_task(runner.lead())
    try:
        yield runner, LeaderRpc(bus, {record.id: runner})
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


async def first_row(line: LeaderRpc, what: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while what not in (row := (await line.why("job_a"))[0])["waiting_for"]:
            await asyncio.sleep(0.02)
    return row


async def test_why_shows_a_full_ledger_and_the_job_goes_on(small: Bus, tmp_path: Path) -> None:
    await fill(small, subjects.LEDGER)
    async with led(small, tmp_path) as (runner, line):
        young = await first_row(line, "the bus, for an entry of the ledger (stream LEDGER is full")
        await asyncio.sleep(0.3)
        old = (await line.why("job_a"))[0]
        assert (old["waiting_for"], old["subject"]) == (young["waiting_for"], subjects.ledger("job_a"))
        assert old["age_s"] >= young["age_s"] + 0.3
        assert not runner.run.state.started
        await small.purge(subjects.LEDGER, junk(subjects.LEDGER))
        await until(lambda: runner.run.state.started)
        assert not [row for row in await line.why("job_a") if "the bus, for" in row["waiting_for"]]
        await runner.outbox.flush()
    rows = [msgspec.json.decode(m.data) for m in await small.read(subjects.EVENTS, subjects.events("job_a"))]
    assert [row["level"] for row in rows if row["type"] == "blocked"] == ["warning"]


async def test_a_leader_that_cannot_recover_reports_the_reason(small: Bus, tmp_path: Path) -> None:
    """The leader must publish tickets of draws in flight again before it decides anything."""
    journal = Journal(small, "job_a")
    await journal.load()
    await journal.append(START)
    await fill(small, subjects.TICKETS)
    async with led(small, tmp_path) as (runner, line):
        await first_row(line, "the bus, for 2 tickets (stream TICKETS is full")
        assert not runner.ready
        assert "its leader to recover" in (await line.why("job_a"))[1]["waiting_for"]
        await small.purge(subjects.TICKETS, junk(subjects.TICKETS))
        await until(lambda: runner.ready)


async def test_the_last_room_of_the_ledger_is_reserved_for_running_jobs(small: Bus, tmp_path: Path) -> None:
    service = CoordinatorService(small, ServiceSettings(data_dir=tmp_path, experience_bytes=1 << 30))
    services: Services = service.services
    first = await services.submissions.submit(CONFIG, SPEC)
    service.runners[first.id] = runner = JobRunner(
        small, service.store, Members(), first, epoch=1, data_dir=tmp_path
    )  # fmt: skip

    async def fill_to(share: float) -> None:
        while (await small.stream_state(subjects.LEDGER)).bytes < share * (1 << 20):
            await small.publish(junk(subjects.LEDGER), b"x" * 10_000)

    await service.watch_ledger()
    assert not [row for row in await services.diagnosis.why(first.id) if "LEDGER" in row["waiting_for"]]
    await fill_to(0.71)
    for _ in range(2):
        await service.watch_ledger()
    await runner.outbox.flush()
    rows = [msgspec.json.decode(m.data) for m in await small.read(subjects.EVENTS, subjects.events(first.id))]
    assert [row["message"][:18] for row in rows if row["type"] == "ledger_filling"] == ["LEDGER is 71% full"]
    assert "penstock rm" in (await services.diagnosis.why(first.id))[-1]["waiting_for"]
    assert (await services.submissions.submit(CONFIG, SPEC)).id, "there is still room"
    await fill_to(0.9)
    for refused in (services.submissions.submit(CONFIG, SPEC), services.submissions.dry_run(CONFIG)):
        with pytest.raises(NoRoom, match="penstock rm JOB") as error:
            await refused
        assert error.value.code == "ledger_full"
    assert len((await service.store.index()).all()) == 2
    await small.purge(subjects.LEDGER, junk(subjects.LEDGER))
    await service.watch_ledger()
    assert (await services.submissions.submit(CONFIG, SPEC)).id


@pytest.mark.parametrize("kind", ["failed", "halted"])
async def test_a_trainers_report_is_recorded_before_it_is_acknowledged(
    small: Bus, tmp_path: Path, kind: Literal["failed", "halted"]
) -> None:
    """The report is in the ledger before the answer, because the trainer does not repeat an acknowledged report."""
    async with led(small, tmp_path) as (runner, _):
        await until(lambda: runner.ready and runner.run.state.started)
        first = Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="p")
        await small.request(subjects.report("job_a"), pack(first, job="job_a"), deadline_s=30)
        await until(lambda: runner.run.state.open)
        await fill(small, subjects.LEDGER)
        report = pack(Report(kind=kind, epoch=1, batch=1, reason="no room for the model"), job="job_a")
        asking = asyncio.create_task(small.request(subjects.report("job_a"), report, deadline_s=60))
        await until(lambda: runner.retry.blocked)
        await asyncio.sleep(0.3)
        assert not asking.done()
        await small.purge(subjects.LEDGER, junk(subjects.LEDGER))
        assert unpack(await asking, Ack)[0].ok
        state = await Journal(small, "job_a", archive=ledger_archive(tmp_path)).load()
    if kind == "failed":
        assert state.finished == "failed"
        return
    why = "batch 1 is not trained: no room for the model"
    assert (state.phase, state.halted) == ("paused", why)
    async with led(small, tmp_path) as (runner, _):
        await until(lambda: runner.ready)
        inputs = runner.desired_state.inputs(runner.run, runner.inputs)
        assert runner.run.halted(inputs) == why, "the next leader knows the reason"
        await JobStore(small).set_desired("job_a", "running")
        runner.update_record(await JobStore(small).get("job_a"))
        await until(lambda: runner.run.state.phase == "running")
        assert not runner.run.state.halted
