"""A trainer that restarts without its inputs, after a move of the data directory, or with damaged checkpoints."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.trainer import checkpointing
from penstock.services.trainer.session import TrainerSession
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import BatchSealed, LineageForked, decode_events
from penstock.shared.protocol.jobs import JobRecord, Operation
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.transport.bus import Bus, Delivery

JOB = "job_fork"
UPDATES = 6
SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        "tokenizer": "char",
    },
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 2},
    "sampling": {"max_new_tokens": 4},
    "train": {
        "batch_size": 4,
        "max_updates": UPDATES,
        "max_lag": 1,
        "max_mismatch": None,
    },  # the log-probs are invented
    "checkpoint": {"every": 100},
}


@asynccontextmanager
async def running(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def generate(bus: Bus, allowed: Callable[[], int]) -> None:
    """Answer every ticket whose ordinal is below ``allowed()`` with two completions of one token."""
    puller = await bus.pull(subjects.TICKETS, subjects.tickets(JOB), f"rollout-{JOB}", ack_wait_s=60, max_deliver=5)
    waiting: list[Delivery] = []
    async with puller:
        while True:
            waiting += await puller.fetch(8, 0.1)
            for delivery in waiting.copy():
                ticket, _ = unpack(delivery.data, Ticket)
                if ticket.draw.ordinal < allowed():
                    data, header = encode_group(group(ticket))
                    await bus.publish(subjects.experience(JOB), data, headers=group_headers(header))
                    await delivery.ack()
                    waiting.remove(delivery)


def group(ticket: Ticket) -> Group:
    ids = np.asarray([3, 4], np.int32)
    return Group(
        job=JOB, draw=ticket.draw, attempt="a", epoch=1, prompt_ids=ids, token_ids=ids,
        cu_seqlens=np.arange(3, dtype=np.int32), logprobs=np.full(2, -1, np.float32), mask=np.ones(2, np.uint8),
        rewards=np.asarray([0, 1], np.float32), failed=np.zeros(2, np.bool_), finish=np.zeros(2, np.uint8),
        spans=np.asarray([[i, ticket.min_version, 0, 1] for i in range(2)], np.int32),
    )  # fmt: skip


async def until(holds: Callable[[], bool], *tasks: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
            await asyncio.sleep(0.02)


async def test_training_continues_after_a_fork(bus: Bus, tmp_path: Path) -> None:
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=SPEC)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path)
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path, worker_id="trainer-0")
    allowed = 4

    def trainer() -> TrainerSession:
        return TrainerSession(bus, settings, JOB, JobConfig.parse(SPEC))

    async with running(runner.lead()) as leading, running(generate(bus, lambda: allowed)) as rollout:
        await until(lambda: runner.ready, leading, rollout)
        state = runner.run.state
        async with running(trainer().run()) as training:
            await until(lambda: state.last_trained == 2, leading, rollout, training)
        allowed = 6
        await until(lambda: 3 in state.sealed, leading, rollout)  # while no trainer is there
        await bus.delete_message(subjects.EXPERIENCE, state.batches[2].seqs[0])
        async with running(trainer().run()) as training:
            await until(lambda: state.dropped["rolled_back"] == 4, leading, rollout, training)
        allowed = 8
        async with running(trainer().run()) as training:
            await until(lambda: state.last_trained >= 3, leading, rollout, training)
        allowed = 1000
        async with running(trainer().run()):
            await until(lambda: bool(state.finished), rollout)
    assert (state.finished, state.updates) == ("succeeded", UPDATES)
    events = [e for m in await bus.read(subjects.LEDGER, subjects.ledger(JOB)) for e in decode_events(m.data)]
    assert [event.from_batch for event in events if isinstance(event, LineageForked)] == [2]
    sealed = [(event.number, event.start_version) for event in events if isinstance(event, BatchSealed)]
    assert sealed == [(1, 0), (2, 1), (3, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]


async def test_a_job_rolls_back_to_a_checkpoint_on_request_and_succeeds(bus: Bus, tmp_path: Path) -> None:
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=SPEC)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    store = JobStore(bus)
    runner = JobRunner(bus, store, Members(), record, epoch=1, data_dir=tmp_path)
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path, worker_id="trainer-0", lease_s=0.5)
    allowed = 4

    async def ask(checkpoint: int) -> None:
        asked = {"id": f"op_{checkpoint}", "kind": "rollback", "args": {"checkpoint": checkpoint}}
        operation = Operation.model_validate({**asked, "created_at": datetime.now(UTC)})
        runner.update_record(await store.begin_operation(JOB, operation))

    async with running(runner.lead()) as leading, running(generate(bus, lambda: allowed)) as rollout:
        await until(lambda: runner.ready, leading, rollout)
        state = runner.run.state
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(SPEC)).run()) as training:
            await until(lambda: state.last_trained == 2, leading, rollout, training)
            await ask(0)
            await until(lambda: state.fork_request == "op_0", leading, rollout, training)
            await ask(7)
            allowed = 1000
            await until(lambda: bool(state.finished), rollout)
    assert (state.finished, state.updates, state.rolled_back) == ("succeeded", UPDATES, ((1, 2),))
    assert state.dropped["rolled_back"] >= 4
    done = {one.id: (one.state, one.message) for one in (await store.get(JOB)).operations}
    assert done["op_0"] == ("succeeded", "")
    assert done["op_7"][0] == "failed"
    assert "there is no checkpoint 7" in done["op_7"][1]


@pytest.mark.long
@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute_as_in_earlier_ledgers"])
async def test_a_job_goes_on_after_its_data_directory_moved(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    if absolute:
        monkeypatch.setattr(checkpointing, "recorded_path", lambda data_dir, path: str(path))
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=SPEC)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    allowed, before, after = 4, tmp_path / "before", tmp_path / "after"

    def trainer(data_dir: Path) -> TrainerSession:
        settings = ServiceSettings(data_dir=data_dir, shm_dir=tmp_path, worker_id="trainer-0", lease_s=0.5)
        return TrainerSession(bus, settings, JOB, JobConfig.parse(SPEC))

    async with running(generate(bus, lambda: allowed)) as rollout:
        runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=before)
        async with running(runner.lead()) as leading, running(trainer(before).run()) as training:
            await until(lambda: runner.ready and runner.run.state.last_trained == 2, leading, rollout, training)
        shutil.move(before, after)
        allowed = 1000
        runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=2, data_dir=after)
        async with running(runner.lead()) as leading, running(trainer(after).run()):
            await until(lambda: runner.ready and bool(runner.run.state.finished), rollout)
    state = runner.run.state
    assert (state.finished, state.updates, state.rolled_back) == ("succeeded", UPDATES, ())
    assert state.checkpoint is not None
    assert (runner.run.path_of(state.checkpoint) / "COMMIT").exists()


async def test_a_trainer_with_different_weights_forks_before_it_announces_them(bus: Bus, tmp_path: Path) -> None:
    """The new trainer computes other updates (with another library, say), so its digest is not the recorded one."""
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=SPEC)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path)
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path, worker_id="trainer-0", lease_s=0.5)
    other = {**SPEC, "optimizer": {"learning_rate": 1e-3, "betas": [0.5, 0.6]}}
    allowed = 4
    async with running(runner.lead()) as leading, running(generate(bus, lambda: allowed)) as rollout:
        await until(lambda: runner.ready, leading, rollout)
        state = runner.run.state
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(SPEC)).run()) as training:
            await until(lambda: state.last_trained == 2, leading, rollout, training)
        before, allowed = dict(state.weights), 1000
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(other)).run()):
            await until(lambda: bool(state.finished), rollout)
    events = [e for m in await bus.read(subjects.LEDGER, subjects.ledger(JOB)) for e in decode_events(m.data)]
    [fork] = [event for event in events if isinstance(event, LineageForked)]
    assert (fork.from_batch, fork.version) == (1, 3), "version 3 is the first that has the new weights"
    assert "gave another weight digest than before" in fork.reason
    assert {version: state.weights[version] for version in before} == before, "each version number names one policy"
    assert (state.finished, state.updates) == ("succeeded", UPDATES)


async def test_a_trainer_falls_back_from_a_damaged_checkpoint_to_the_previous_one(bus: Bus, tmp_path: Path) -> None:
    spec = {**SPEC, "checkpoint": {"every": 2, "keep": 2}}
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=spec)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path)
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path, worker_id="trainer-0", lease_s=0.5)
    allowed = 8
    async with running(runner.lead()) as leading, running(generate(bus, lambda: allowed)) as rollout:
        await until(lambda: runner.ready, leading, rollout)
        state = runner.run.state
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(spec)).run()) as training:
            await until(lambda: state.last_trained == 4 and len(state.checkpoints) > 1, leading, rollout, training)
        *_, before, newest = sorted(state.checkpoints)
        damaged = runner.run.path_of(state.checkpoints[newest])
        weights = damaged / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(spec)).run()) as training:
            await until(lambda: runner.run.path_of(state.checkpoints[max(state.checkpoints)]) != damaged, training)
        allowed = 1000
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(spec)).run()):
            await until(lambda: bool(state.finished), rollout)
    assert (state.finished, state.updates, state.rolled_back) == ("succeeded", UPDATES, ())
    rows = [msgspec.json.decode(m.data) for m in await bus.read(subjects.EVENTS, subjects.events(JOB))]
    [event] = [one for one in rows if f"goes on from checkpoint {before}:" in str(one)]
    assert f"{weights} was changed" in str(event), (
        "one event: the next trainer finds a checkpoint that was written anew"
    )


@pytest.mark.long
@pytest.mark.parametrize("lost", [subjects.BATCHES, subjects.EXPERIENCE], ids=["the_batch", "its_groups"])
async def test_a_sealed_batch_without_its_messages_does_not_block_the_job(bus: Bus, tmp_path: Path, lost: str) -> None:
    """The messages were removed while no trainer ran."""
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=SPEC)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path)
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path, worker_id="trainer-0", lease_s=0.5)
    allowed = 2
    async with running(runner.lead()) as leading, running(generate(bus, lambda: allowed)) as rollout:
        await until(lambda: runner.ready, leading, rollout)
        state = runner.run.state
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(SPEC)).run()) as training:
            await until(lambda: state.last_trained == 1, leading, rollout, training)
        allowed = 6
        await until(lambda: 2 in state.sealed, leading, rollout)
        subject = {subjects.BATCHES: subjects.batches, subjects.EXPERIENCE: subjects.experience}[lost](JOB)
        await bus.purge(lost, subject)
        allowed = 1000
        async with running(TrainerSession(bus, settings, JOB, JobConfig.parse(SPEC)).run()):
            await until(lambda: bool(state.finished), rollout)
    assert (state.finished, state.updates) == ("succeeded", UPDATES)
