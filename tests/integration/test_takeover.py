"""A new leader of a job with stored groups reads undecided groups, leads, and looks up the others during its work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.effects import EffectPublisher
from penstock.services.coordinator.leader.evaluation import evaluation_tickets
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Event
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ack, Report
from penstock.shared.protocol.trajectory import GroupHeader, group_headers
from penstock.shared.transport.bus import Bus

SPEC: dict[str, Any] = {
    "name": "kept",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 2},
    "train": {"batch_size": 8, "max_updates": 100},
}
CONFIG, JOB, UPDATES = JobConfig.parse(SPEC), "job_kept", 6


class Past:
    """State that an earlier leader left: a ledger, and groups in EXPERIENCE, among them a dropped group."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.journal = bus, Journal(bus, JOB)
        self.run = JobRun(CONFIG, LedgerState(), num_ordinals=None, writer_epoch=1)

    async def make(self) -> None:
        await self.journal.load()
        await self._commit(self.run.decide(Inputs(100.0)))
        await self._report("checkpointed", batch=0, version=0, digest="w0", path="p")
        for number in range(1, UPDATES + 1):
            for draw in self.run.state.in_flight:
                self.run.on_group(*await self.store(draw, number - 1))
            if number == 2:
                await self.store(Draw(0), 0)
            await self._commit(self.run.decide(Inputs(100.0)))
            await self._report("trained", batch=number, revision=1, version=number, digest=f"w{number}")

    async def store(self, draw: Draw, version: int) -> tuple[int, GroupHeader]:
        header = GroupHeader(
            draw=draw, attempt="a", epoch=1, digest="d", nbytes=1000, prompt_tokens=2, lengths=[2, 2],
            rewards=[1.0, 0.0], failed=[False] * 2, truncated=[False] * 2, finite=True, min_version=version,
            max_version=version, worker="w", temperature=1.0,
        )  # fmt: skip
        seq = await self.bus.publish(subjects.experience(JOB), b"small", headers=group_headers(header))
        return seq, header

    async def _report(self, kind: Any, **fields: Any) -> None:
        events = self.run.on_report(Report(kind=kind, epoch=1, **fields), Inputs(100.0))
        await self._commit([*events, *self.run.decide(Inputs(100.0), after=events)])

    async def _commit(self, events: list[Event]) -> None:
        await self.journal.append(events)
        self.run.commit(events)


@asynccontextmanager
async def led(bus: Bus, directory: Path) -> AsyncIterator[JobRunner]:
    record = await JobStore(bus).create(CONFIG, JOB)
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=2, data_dir=directory)
    leading = asyncio.create_task(runner.lead())
    try:
        await until(lambda: runner.ready or leading.done())
        yield runner
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_new_leader_reads_undecided_groups_and_deletes_dropped_ones(bus: Bus, tmp_path: Path) -> None:
    past = Past(bus)
    await past.make()
    groups = await bus.read(subjects.EXPERIENCE, subjects.experience(JOB), headers_only=True)
    assert len(groups) == 4 * UPDATES + 1
    gone, late = past.run.state.batches[3].seqs[0], past.run.state.in_flight[0]
    await bus.delete_message(subjects.EXPERIENCE, gone)
    late_seq, _ = await past.store(late, UPDATES)

    async with led(bus, tmp_path) as runner:
        run = runner.run
        assert run.candidates[late].seq == late_seq
        assert runner._unread == run.state.heard + 1 <= late_seq, "trained groups were not read"
        kept = {seq for batch in run.state.batches.values() for seq in batch.seqs} - {gone}
        await until(lambda: set(run.stored) == kept | {late_seq})
        assert run.stored_bytes == 1000 * (len(kept) + 1)
        async with asyncio.timeout(30):  # the dropped group is deleted
            while await left(bus) != kept | {late_seq}:
                await asyncio.sleep(0.02)


async def left(bus: Bus) -> set[int]:
    return {m.seq for m in await bus.read(subjects.EXPERIENCE, subjects.experience(JOB), headers_only=True)}


async def test_the_next_leader_writes_a_metrics_row_that_the_last_one_did_not(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader died after it had answered the trainer, and before it wrote the row of METRICS."""
    past, number = Past(bus), UPDATES + 1
    await past.make()
    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "run", lambda self: asyncio.Event().wait())
        async with led(bus, tmp_path) as runner:
            state = runner.run.state
            await until(lambda: min(info.deadline for info in state.open.values()) > 1000.0)  # redrawn by this leader
            for draw in state.in_flight:
                await past.store(draw, UPDATES)
            await until(lambda: number in runner.run.state.sealed)
            values = {"reward/mean": 0.75, "kl": float("nan")}
            report = Report(
                kind="trained", epoch=1, batch=number, revision=1, version=number, digest="w", metrics=values
            )
            answer = await bus.request(subjects.report(JOB), pack(report, job=JOB), deadline_s=10)
            assert unpack(answer, Ack)[0].ok
    assert await rows(bus) == []
    for _ in range(2):  # the leader after that finds the row
        async with led(bus, tmp_path) as runner:
            assert runner.measures.reward == 0.75
            async with asyncio.timeout(30):
                while not (found := await rows(bus)):
                    await asyncio.sleep(0.02)
            await runner.outbox.flush()
    (row,) = found
    assert (row["kind"], row["step"], row["batch"], row["version"]) == ("train", number, number, number)
    assert (row["values"]["reward/mean"], row["values"]["kl"]) == (0.75, None)
    assert row["values"]["tokens/trained"] > 0, "the ledger has the counts of the leader, too"


@pytest.mark.parametrize("mismatch", [0.9, 1.1, float("nan")])
async def test_a_job_pauses_when_logprobs_of_engines_and_trainer_differ(
    bus: Bus, tmp_path: Path, mismatch: float
) -> None:
    past, number = Past(bus), UPDATES + 1
    await past.make()
    async with led(bus, tmp_path) as runner:
        state = runner.run.state
        await until(lambda: min(info.deadline for info in state.open.values()) > 1000.0)
        for draw in state.in_flight:
            await past.store(draw, UPDATES)
        await until(lambda: number in runner.run.state.sealed)
        report = Report(
            kind="trained", epoch=1, batch=number, revision=1, version=number, digest="w",
            metrics={"mismatch/logprob": mismatch},
        )  # fmt: skip
        answer = await bus.request(subjects.report(JOB), pack(report, job=JOB), deadline_s=10)
        assert unpack(answer, Ack)[0].ok
        assert runner.run.state.last_trained == number
        if mismatch < 1:
            assert (runner.inputs.desired, runner.run.halted(runner.inputs)) == ("running", "")
            return
        why = runner.run.halted(runner.inputs)
        assert f"update {number}" in why
        assert "train.max_mismatch 1" in why
        assert runner.inputs.desired == "paused"
        assert any(why in row["waiting_for"] for row in runner.why())


async def rows(bus: Bus) -> list[dict[str, Any]]:
    return [msgspec.json.decode(m.data) for m in await bus.read(subjects.METRICS, subjects.metrics(JOB))]


async def test_a_stream_that_ends_early_is_read_from_its_beginning(bus: Bus, tmp_path: Path) -> None:
    """The stream was restored or created anew, so the sequence numbers in the ledger do not apply to it."""
    past = Past(bus)
    await past.make()
    await bus._call(f"STREAM.DELETE.{subjects.EXPERIENCE}", None, "delete the stream")
    await bus.ensure_streams(experience_bytes=64 << 20, stream_bytes=16 << 20)
    draw = past.run.state.in_flight[0]
    seq, _ = await past.store(draw, UPDATES)
    assert seq == 1
    async with led(bus, tmp_path) as runner:
        assert runner.run.candidates[draw].seq == 1


async def test_a_restarted_evaluation_requests_its_prompts_again(bus: Bus) -> None:
    """The leader failed and leads the job again, without the results of its first evaluation of this version."""
    publisher = EffectPublisher(bus, JOB, epoch=1)
    for begun in (100.0, 101.0):
        tickets = evaluation_tickets([0, 1], 3, deadline=begun + 60, epoch=1)
        for _ in range(2):  # a publish whose answer was lost is repeated
            await publisher.publish_tickets(tickets)
    assert (await bus.stream_state(subjects.TICKETS)).messages == 4
