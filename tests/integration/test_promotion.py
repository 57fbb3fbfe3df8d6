"""A refused version is measured and never served, training goes back, and the served version survives all restarts.

Leader, trainer and rollout worker are real, on one bus. The test posts an agent's answers, and scores held-out prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.evaluation import EvaluationPlan
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.services.coordinator.training.inputs import Inputs, Rollback
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.services.rollout.session import RolloutSession
from penstock.services.trainer.session import TrainerSession
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.check import SourceSummary
from penstock.shared.errors import NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Checkpointed, LineageForked, Promoted, PromotionRefused, decode_events
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import Operation
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, Interaction, new_marked_id
from penstock.shared.protocol.messages import ScoreReply, ScoreRequest, Ticket
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import open_receiver

CONFIG = OnlineJob.parse(
    {
        "kind": "online_rl", "name": "gated",
        "model": {
            "config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
            "tokenizer": "char",
        },
        "data": {"eval": {"type": "addition"}}, "reward": {"scorers": [{"type": "exact"}]},
        "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 2, "max_lag": 1, "max_mismatch": None},
        "evaluation": {"every": 1, "num_prompts": 2}, "checkpoint": {"every": 100},
        "online": {"max_wait_s": 3600, "promotion": {"max_drop": 0.1, "patience": 2}},
    }
)  # fmt: skip


@dataclass
class Job:
    """The running job, and the versions that its rollout worker has served."""

    bus: Bus
    id: str
    runner: JobRunner
    rollout: RolloutSession
    settings: ServiceSettings
    worth: float = 1.0
    """Reward of every answer to a held-out prompt."""
    served: list[int] = field(default_factory=list)
    said: int = 0

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while True:
                version = int(self.rollout.status()["version"])
                if version >= 0 and version not in self.served[-1:]:
                    self.served.append(version)
                if holds():
                    return
                await asyncio.sleep(0.02)

    async def score(self, data: bytes) -> bytes:
        count = len(unpack(data, ScoreRequest)[0].completions)
        reply = ScoreReply(rewards=[self.worth] * count, failed=[False] * count, parts={}, errors=[""] * count)
        return pack(reply, job=self.id)

    async def answer(self, version: int) -> None:
        """Publish a batch of two answers of a version, one with reward 1 and one with -1."""
        now = time.time()
        names = [new_marked_id(self.id) for _ in range(2)]
        for name in names:
            record = Interaction(
                id=name, request=name, index=0, job=self.id, episode=new_marked_id(self.id), alone=True, key_id="k",
                user="u", split="train", untrainable="", prompt_ids=[4, 5], token_ids=[6, 7, 2],
                logprobs=[-1.0, -1.0, -1.0], spans=[Span(version, 0, 3)], sampling=Sampling(max_new_tokens=4),
                finish="stop", template="t", body_digest="b", text="ab", started=now, first_token=now, ended=now,
            )  # fmt: skip
            await self.bus.publish(subjects.interaction(self.id, name), pack(record, job=self.id), msg_id=name)
        items = [
            Feedback(
                id=new_marked_id(self.id), job=self.id, kind="metric", key_id="k", received=now, inference=name,
                metric="reward", value=value,
            )
            for name, value in zip(names, (1.0, -1.0), strict=True)
        ]  # fmt: skip
        await self.bus.publish(subjects.feedback(self.id), pack(FeedbackBatch(items=items), job=self.id))

    async def manifest(self) -> WeightManifest:
        """Return the manifest of the version that engines are to serve."""
        entry = await self.bus.kv(subjects.MANIFESTS).get(self.id)
        assert entry is not None
        assert entry.value is not None
        return unpack(entry.value, WeightManifest)[0]

    async def until_announced(self, version: int) -> WeightManifest:
        async with asyncio.timeout(60):
            while (found := await self.manifest()).version != version:
                await asyncio.sleep(0.02)
            return found

    async def until_announced_again(self, before: WeightManifest) -> None:
        """Wait until another trainer publishes the same version, and check that it can be staged."""
        async with asyncio.timeout(60):
            while (found := await self.manifest()).epoch == before.epoch:
                await asyncio.sleep(0.02)
        assert (found.version, found.digest) == (before.version, before.digest)
        staged = await asyncio.to_thread(open_receiver(self.settings).stage, found)
        staged.release()

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[None]:
        async with running(TrainerSession(self.bus, self.settings, self.id, CONFIG).run):
            yield

    async def ask(self, kind: Any, **args: int) -> None:
        operation = Operation(id=f"op_{kind}", kind=kind, args=args, created_at=datetime.now(UTC))
        self.runner.update_record(await self.runner.store.begin_operation(self.id, operation))


async def until_gone(bus: Bus, seq: int) -> None:
    """Wait until the ticket at ``seq``, for a version that training left behind, is removed."""
    async with asyncio.timeout(60):
        with contextlib.suppress(NotFound):
            while True:
                await bus.get(subjects.TICKETS, seq)
                await asyncio.sleep(0.05)


def lose_slots(directory: Path) -> None:
    """Remove all weight slots, as a reboot of the trainer's host does."""
    for slot in directory.glob("penstock-weights-*"):
        slot.unlink()


@asynccontextmanager
async def running(work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running_job(bus: Bus, directory: Path) -> AsyncIterator[Job]:
    store = JobStore(bus)
    record = await store.create(CONFIG)
    supply = LiveSupply(bus, record.id, CONFIG, epoch=1)
    runner = JobRunner(bus, store, Members(), record, epoch=1, data_dir=directory, supply=supply)
    settings = ServiceSettings(data_dir=directory, shm_dir=directory, worker_id="w", lease_s=0.5)
    job = Job(bus, record.id, runner, RolloutSession(bus, settings, record.id, CONFIG), settings)
    scorer = await bus.serve(subjects.score(record.id), job.score)
    async with running(runner.lead), running(job.rollout.run):
        yield job
    await scorer.close(0.5)


async def test_no_evaluation_begins_while_training_is_to_go_back(bus: Bus, tmp_path: Path) -> None:
    """An evaluation would need the version that training is about to leave behind, and its tickets would be late."""
    record = await JobStore(bus).create(CONFIG)
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path)
    runner.run = JobRun(CONFIG, LedgerState(started=True), num_ordinals=None, writer_epoch=1)
    runner.run.state.checkpoint = Checkpointed(
        writer_epoch=1, time=0.0, number=0, version=0, digest="w0", path="c0", trainer_epoch=1, low_seq=0
    )
    plan = runner.measures.plan = EvaluationPlan(CONFIG.evaluation, [SourceSummary("addition", 2, "sums")])
    for rollback, tickets in ((Rollback(0, "by request", "op"), 0), (None, 2)):
        runner._inputs = Inputs(0.0, rollback=rollback)
        await runner._evaluate()
        assert (plan.current is None) == (rollback is not None)
        assert (await bus.stream_state(subjects.TICKETS)).messages == tickets


@pytest.mark.long
async def test_a_refused_version_is_never_served_and_training_goes_back(bus: Bus, tmp_path: Path) -> None:
    async with running_job(bus, tmp_path) as job:
        await job.until(lambda: job.runner.ready)
        state, gate = job.runner.run.state, job.runner.run.promotion
        assert gate is not None
        async with job.trainer():
            await job.until(lambda: state.promoted is not None and bool(state.promoted.figures))
            first = await job.until_announced(0)
            job.worth = 0.0
            await job.answer(version=0)
            await job.until(lambda: state.num_refused == 1)
        assert gate.fact(state)[:2] == ("False", "BoundBroken")
        assert any("version 1: eval/greedy 0 < 0.9" in row["waiting_for"] for row in job.runner.why())
        assert (await job.manifest()).epoch == first.epoch

        lose_slots(tmp_path)
        async with job.trainer():
            await job.until_announced_again(first)
            await job.answer(version=0)  # trained on: it is within the bound on lag of version 1
            await job.until(lambda: state.promoted is not None and state.promoted.version == 3)
            again = await job.until_announced(3)
            assert again.digest == first.digest, "the weights of version 0 under a new number"
            await job.until(lambda: job.rollout.status()["version"] == 3)
            job.worth = 1.0
            await job.answer(version=3)
            await job.until(lambda: job.rollout.status()["version"] == 4)
            await job.ask("rollback", checkpoint=0)
            await job.until(lambda: job.rollout.status()["version"] == 5)
            assert (await job.manifest()).digest == first.digest
            assert state.fork_request == "op_rollback"
            await job.until(lambda: state.promoted is not None and bool(state.promoted.figures))
            left = Ticket(draw=Draw(0), min_version=4, version=4, deadline=time.time() + 3600, epoch=1, purpose="eval")
            seq = await bus.publish(subjects.tickets(job.id), pack(left, job=job.id))
            await until_gone(bus, seq)
    assert job.served == [0, 3, 4, 5]
    events = [decode_events(message.data) for message in await bus.read(subjects.LEDGER, subjects.ledger(job.id))]
    decisions = [
        (type(event).__name__, event.version, event.reason)
        for entry in events
        for event in entry
        if isinstance(event, Promoted | PromotionRefused)
    ]
    assert decisions == [
        ("Promoted", 0, "initial"),
        ("Promoted", 0, "measured"),
        ("PromotionRefused", 1, "eval/greedy 0 < 0.9"),
        ("PromotionRefused", 2, "eval/greedy 0 < 0.9"),
        ("Promoted", 3, "rolled back"),
        ("Promoted", 4, "passed"),
        ("Promoted", 5, "rolled back"),
        ("Promoted", 5, "measured"),
    ]
    assert [event.from_batch for entry in events for event in entry if isinstance(event, LineageForked)] == [1, 3]
    assert not audit_ledger(events, CONFIG, {}).violations
