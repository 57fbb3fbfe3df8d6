"""A worker dies or leaves during a group, and another worker continues with its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.rollout import session, tickets
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.session import RolloutSession
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Dropped, decode_events
from penstock.shared.protocol.frame import decode_frame
from penstock.shared.protocol.generation import Sample
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import Ack, Report, ScoreReply, ScoreRequest, Ticket
from penstock.shared.protocol.partial import decode_partial
from penstock.shared.protocol.trajectory import Group, decode_group
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import layout_of, open_publisher

JOB = "job_partial"
SIZE, LENGTH = 4, 1500
SPEC: dict[str, Any] = {
    "name": "partial",
    "model": {
        "config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "max_position_embeddings": 2048},
        "tokenizer": "char",
    },
    "data": {"train": {"type": "addition"}, "prompt": {"max_tokens": 16}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": SIZE},
    "sampling": {"max_new_tokens": LENGTH, "ignore_eos": True},
    "train": {"batch_size": SIZE, "max_updates": 1, "max_lag": 1},
    "rollout": {"checkpoint_s": 0.05},
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceSettings]:
    """Settings with a lease of one second, and a drain that waits 0.1 s for groups to end."""
    monkeypatch.setattr(session, "GRACE_S", 0.1)
    monkeypatch.setattr(tickets, "ACK_WAIT_S", 1.0)
    (tmp_path / "shm").mkdir()
    before = torch.get_num_threads()
    yield ServiceSettings(shm_dir=tmp_path / "shm", data_dir=tmp_path)
    torch.set_num_threads(before)


class Job:
    """Plays trainer and scorer of a job, and starts its rollout workers."""

    def __init__(self, bus: Bus, settings: ServiceSettings, config: JobConfig) -> None:
        self.bus, self.settings, self.config = bus, settings, config
        self.model = build_model(config.model, len(build_tokenizer(config.model)), seed=0)
        self.publisher = open_publisher(JOB, layout_of(self.model.named_parameters()), settings)
        self.digest = ""

    async def publish(self, version: int) -> str:
        """Publish the weights of a version, different from all others; return their digest."""
        with torch.no_grad():
            tensors = {name: tensor * (1 + version / 10) for name, tensor in self.model.named_parameters()}
        manifest = self.publisher.publish(tensors.items(), version=version, epoch=1)
        await self.bus.kv(subjects.MANIFESTS).put(JOB, pack(manifest, job=JOB, id="m", epoch=1))
        return manifest.digest

    async def ask(self, ordinal: int = 0, *, min_version: int = 0) -> None:
        """Publish a ticket for a draw."""
        ticket = Ticket(draw=Draw(ordinal), min_version=min_version, deadline=0.0, deadline_s=120.0, epoch=1)
        await self.bus.publish(subjects.tickets(JOB), pack(ticket, job=JOB))

    async def score(self, data: bytes) -> bytes:
        request, envelope = unpack(data, ScoreRequest)
        num = len(request.completions)
        return pack(ScoreReply(rewards=[1.0] * num, failed=[False] * num, parts={}, errors=[]), job=JOB, id=envelope.id)

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Worker]:
        """Run a rollout worker; leaving the block kills it, and it gives back no tickets."""
        settings = self.settings.model_copy(update={"worker_id": name})
        worker = Worker(RolloutSession(self.bus, settings, JOB, self.config))
        try:
            yield worker
        finally:
            worker.task.cancel()
            await asyncio.gather(worker.task, return_exceptions=True)

    async def saved(self) -> dict[int, Sample]:
        """Return the saved partial completions of draw 0."""
        found = {}
        for message in await self.bus.read(subjects.PARTIAL, subjects.partials(JOB)):
            recipe = decode_frame(message.data)["recipe"]
            found[int(message.subject.rpartition(".")[2])] = decode_partial(message.data, recipe)
        return found

    async def until_saved(self, num_tokens: int) -> dict[int, Sample]:
        """Wait until ``num_tokens`` tokens of each completion are saved; return the saved completions."""

        async def there() -> bool:
            saved = await self.saved()
            return len(saved) == SIZE and all(len(sample.token_ids) >= num_tokens for sample in saved.values())

        await until(there)
        return await self.saved()

    async def group(self) -> Group:
        """Wait for the job's only group, and return it after a check that it is complete."""

        async def there() -> bool:
            return bool(await self.bus.subject_counts(subjects.EXPERIENCE, subjects.experience(JOB)))

        await until(there)
        heads = await self.bus.read(subjects.EXPERIENCE, subjects.experience(JOB), headers_only=True)
        assert len(heads) == 1
        [message] = (await self.bus.get_whole(subjects.EXPERIENCE, [heads[0].seq])).values()
        group = decode_group(message.data)
        assert group.lengths.tolist() == [LENGTH] * SIZE
        assert not group.failed.any()
        return group


class Worker:
    """A rollout worker, running in a task."""

    def __init__(self, session: RolloutSession) -> None:
        self.session = session
        self.task = asyncio.create_task(session.run())

    @property
    def engine(self) -> Engine:
        assert self.session._engine is not None
        return self.session._engine

    async def until_tokens(self, num: int) -> None:
        """Wait until the worker's engine has generated ``num`` tokens."""

        async def there() -> bool:
            assert not self.task.done(), self.task.exception()
            return bool(self.session.status()["generated_tokens"] >= num)

        await until(there)

    async def leave(self) -> None:
        """Drain the worker, as after SIGTERM, and wait for its end."""
        self.session.drain()
        await asyncio.wait_for(asyncio.shield(self.task), 60)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(90):
        while not await holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(bus: Bus, settings: ServiceSettings, **changes: Any) -> AsyncIterator[Job]:
    config = parse_job({**SPEC, **changes})
    assert isinstance(config, JobConfig)
    job = Job(bus, settings, config)
    job.digest = await job.publish(0)
    server = await bus.serve(subjects.score(JOB), job.score)
    try:
        yield job
    finally:
        await server.close(0.5)
        job.publisher.close()


def check_beginning(group: Group, begun: dict[int, Sample]) -> int:
    """Check that the group's completions begin with the saved samples; return the number of saved tokens."""
    for place, sample in begun.items():
        start = int(group.cu_seqlens[place])
        stop = start + len(sample.token_ids)
        assert group.token_ids[start:stop].tolist() == sample.token_ids
        assert group.logprobs[start:stop].tolist() == sample.logprobs
    return sum(len(sample.token_ids) for sample in begun.values())


async def alone(bus: Bus, job: Job) -> Group:
    """Return the group of draw 0 by a worker that nothing interrupts, and remove it from the stream."""
    await job.ask()
    async with job.worker("alone") as worker:
        await worker.until_tokens(SIZE * LENGTH)
        group = await job.group()
        await until(lambda: has_no_ticket(bus))
    await bus.purge(subjects.EXPERIENCE, subjects.experience(JOB))
    await bus.purge(subjects.PARTIAL, subjects.partials(JOB))
    return group


async def has_no_ticket(bus: Bus) -> bool:
    return (await bus.stream_state(subjects.TICKETS)).messages == 0


@pytest.mark.long
async def test_another_worker_goes_on_after_a_death(bus: Bus, settings: ServiceSettings) -> None:
    async with running(bus, settings) as job:
        whole = await alone(bus, job)
        await job.ask()
        async with job.worker("first") as first:
            await job.until_saved(100)
            assert not first.task.done()
        begun = await job.saved()
        async with job.worker("second") as second:
            group = await job.group()
            num_tokens = check_beginning(group, begun)
            assert 100 * SIZE <= num_tokens < SIZE * LENGTH
            row = second.session.status()
            assert row["continued_tokens"] == num_tokens
            assert row["generated_tokens"] == SIZE * LENGTH - num_tokens
        assert group.spans.tolist() == whole.spans.tolist()
        assert group.token_ids.tolist() == whole.token_ids.tolist(), "as if nobody had died"
        assert group.meta["worker"] == "second"
        assert abs(group.logprobs - whole.logprobs).max() < 1e-4


async def test_no_token_of_a_worker_that_leaves_is_lost(bus: Bus, settings: ServiceSettings) -> None:
    async with running(bus, settings, rollout={"checkpoint_s": 3600}) as job:
        await job.ask()
        async with job.worker("first") as first:
            await first.until_tokens(100)
            assert not await job.saved(), "checkpoints are far away"
            await first.engine.pause("keep")  # its group cannot end in time
            engine, done = first.engine, first.engine.generated_tokens
            await first.leave()
            assert engine.generated_tokens == done
        begun = await job.saved()
        assert sum(len(sample.token_ids) for sample in begun.values()) == done
        async with job.worker("second") as second:
            group = await job.group()
            assert check_beginning(group, begun) == done
            assert second.session.status()["generated_tokens"] == SIZE * LENGTH - done


@asynccontextmanager
async def led(job: Job, spec: dict[str, Any]) -> AsyncIterator[None]:
    """Run the job's leader, which requests the first group."""
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=spec)
    await job.bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    runner = JobRunner(job.bus, JobStore(job.bus), Members(), record, epoch=1, data_dir=job.settings.data_dir)
    leading = asyncio.create_task(runner.lead())

    async def ready() -> bool:
        assert not leading.done(), leading.exception()
        return runner.ready

    try:
        await until(ready)
        start = Report(kind="checkpointed", epoch=1, batch=0, version=0, digest=job.digest, path="p")
        reply = await job.bus.request(subjects.report(JOB), pack(start, job=JOB), deadline_s=30)
        assert unpack(reply, Ack)[0].ok
        yield
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


@pytest.mark.long
async def test_a_group_moves_more_often_than_a_ticket_may_fail(
    bus: Bus, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On preemptible machines a long group moves often; no token of it is generated twice."""
    monkeypatch.setattr(tickets, "MAX_DELIVER", 2)
    train = {**SPEC["train"], "max_lag": 0}
    done = 0
    async with running(bus, settings, train=train) as job, led(job, {**SPEC, "train": train}):
        for number in range(4):
            async with job.worker(f"leaving-{number}") as worker:
                await worker.until_tokens(50)
                await worker.engine.pause("keep")  # its group cannot end in time
                done += worker.engine.generated_tokens
                await worker.leave()
            assert sum(len(sample.token_ids) for sample in (await job.saved()).values()) == done
        begun = await job.saved()
        async with job.worker("last") as last:
            group = await job.group()
            assert check_beginning(group, begun) == done
            assert last.session.status()["generated_tokens"] == SIZE * LENGTH - done
            await until(lambda: has_no_ticket(bus))
        assert group.draw == Draw(0)
        entries = await bus.read(subjects.LEDGER, subjects.ledger(JOB))
        assert not [one for entry in entries for one in decode_events(entry.data) if isinstance(one, Dropped)]


@pytest.mark.long
async def test_a_group_that_ends_in_time_stays(
    bus: Bus, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GRACE_S", 120.0)
    patient = settings.model_copy(update={"drain_s": 600.0})
    async with running(bus, patient) as job:
        await job.ask()
        async with job.worker("first") as first:
            await first.until_tokens(100)
            await first.leave()
        assert (await job.group()).meta["worker"] == "first"
        assert await has_no_ticket(bus)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["keep", "restart"])
async def test_a_new_version_continues_or_restarts_a_group(bus: Bus, settings: ServiceSettings, rule: str) -> None:
    """The group has tokens of both versions, or, with ``on_update: restart``, of the new one alone."""
    async with running(bus, settings, rollout={"checkpoint_s": 0.05, "on_update": rule}) as job:
        await job.ask()
        async with job.worker("first"):
            await job.until_saved(50)
        begun = await job.saved()
        await job.publish(1)
        async with job.worker("second") as second:
            group = await job.group()
            continued = second.session.status()["continued_tokens"]
        if rule == "restart":
            assert (continued, {int(version) for version in group.spans[:, 1]}) == (0, {1})
            return
        assert continued == check_beginning(group, begun)
        lengths = [len(begun[place].token_ids) for place in range(SIZE)]
        assert group.spans.tolist() == [
            row
            for place, num in enumerate(lengths)
            for row in ([place, 0, 0, num], [place, 1, num, LENGTH])
        ]  # fmt: skip
        old, new = group.weights[:2]
        assert group.weights == (old, new) * SIZE
        assert old != new


@pytest.mark.long
async def test_tokens_that_the_gate_would_refuse_are_not_continued(bus: Bus, settings: ServiceSettings) -> None:
    async with running(bus, settings) as job:
        await job.ask()
        async with job.worker("first"):
            await job.until_saved(50)
        await job.publish(2)
        async with job.worker("second") as second:
            group = await job.group()
            assert second.session.status()["continued_tokens"] == 0
        assert {int(version) for version in group.spans[:, 1]} == {2}


@pytest.mark.long
async def test_a_ticket_that_waits_for_new_weights_does_not_hold_a_worker_that_leaves(
    bus: Bus, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if groups cannot move, because there are no tokens to lose."""
    async with running(bus, settings, rollout={"checkpoint_s": 0, "on_update": "restart"}) as job:
        await job.ask()
        async with job.worker("first") as first:
            await first.until_tokens(100)
            held = asyncio.Event()

            async def commit() -> float:
                await held.wait()
                return 0.0

            monkeypatch.setattr(first.engine, "commit_update", commit)
            await job.publish(1)

            async def waits() -> bool:
                return first.session.status().get("waiting_for") == "an update to newer weights"

            await until(waits)
            await first.leave()
        async with job.worker("second"):
            group = await job.group()
        assert (group.meta["worker"], {int(version) for version in group.spans[:, 1]}) == ("second", {1})


@pytest.mark.long
async def test_without_checkpoints_the_ticket_begins_again(bus: Bus, settings: ServiceSettings) -> None:
    async with running(bus, settings, rollout={"checkpoint_s": 0}) as job:
        await job.ask()
        async with job.worker("first") as first:
            await first.until_tokens(100)
        async with job.worker("second") as second:
            await job.group()
            assert second.session.status()["generated_tokens"] == SIZE * LENGTH
        assert not await job.saved()
