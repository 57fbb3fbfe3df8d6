"""The leader of an evaluation job on a real bus requests only missing answers, and reports those that never arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader import evaluation_runner
from penstock.services.coordinator.leader.evaluation_runner import EvaluationRunner
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.ids import Draw, new_attempt
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import Report, Ticket
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers, parse_group_header
from penstock.shared.transport.bus import Bus

SPEC: dict[str, Any] = {
    "kind": "evaluation",
    "name": "measure",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"eval": [{"type": "addition", "num_rows": 3}, {"type": "addition", "num_rows": 1, "name": "last"}]},
    "reward": {"scorers": [{"type": "exact"}]},
    "evaluation": {"samples": 1},
    "limits": {"timeout_s": 60},
}


async def submit(bus: Bus, **changes: Any) -> JobRecord:
    return await JobStore(bus).create(parse_job({**SPEC, **changes}))


@asynccontextmanager
async def leading(bus: Bus, record: JobRecord, epoch: int) -> AsyncIterator[EvaluationRunner]:
    """Run a leader, killed at the end of the block."""
    runner = EvaluationRunner(bus, JobStore(bus), Members(), record, epoch=epoch)
    task = asyncio.create_task(runner.lead())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(holds: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(30):
        while not await holds():
            await asyncio.sleep(0.02)


async def asked(bus: Bus, job: str, epoch: int) -> list[tuple[int, int]]:
    """Return ``(sequence number, prompt)`` of each ticket of the leader with ``epoch``."""
    messages = await bus.walk(subjects.TICKETS, subjects.tickets(job), last_seq=1000)
    tickets = [(message.seq, unpack(message.data, Ticket)[0]) for message in messages]
    return [(seq, ticket.draw.ordinal) for seq, ticket in tickets if ticket.epoch == epoch]


async def answer(bus: Bus, job: str, prompt: int, sampled: float, greedy: float, *, failed: bool = False) -> None:
    group = Group(
        job=job, draw=Draw(prompt), attempt=new_attempt(), epoch=1,
        prompt_ids=np.arange(3, dtype=np.int32), token_ids=np.arange(4, dtype=np.int32),
        cu_seqlens=np.asarray([0, 2, 4], np.int32), logprobs=np.full(4, -0.5, np.float32), mask=np.ones(4, np.uint8),
        rewards=np.asarray([sampled, greedy], np.float32), failed=np.asarray([failed, failed]),
        finish=np.zeros(2, np.uint8), spans=np.asarray([[0, 0, 0, 2], [1, 0, 0, 2]], np.int32),
        greedy=np.asarray([False, True]), meta={"error": "scorer broke"} if failed else {},
    )  # fmt: skip
    data, header = encode_group(group)
    await bus.publish(subjects.experience(job), data, headers=group_headers(header))


async def ended(bus: Bus, job: str) -> JobRecord:
    async def has_ended() -> bool:
        return (await JobStore(bus).get(job)).status.phase in ("succeeded", "failed", "cancelled")

    await eventually(has_ended)
    return await JobStore(bus).get(job)


async def test_a_new_leader_requests_only_missing_answers(bus: Bus) -> None:
    record = await submit(bus)
    job = record.id
    async with leading(bus, record, 1) as first:
        await eventually(lambda: asked(bus, job, 1))
        await answer(bus, job, 0, 1.0, 1.0)
        await answer(bus, job, 2, 0.0, 1.0)

        async def took_both() -> bool:
            return first.expected == {1, 3}

        await eventually(took_both)
    await answer(bus, job, 2, 1.0, 0.0)  # a ticket that was delivered twice: the first answer counts
    async with leading(bus, await JobStore(bus).get(job), 2):
        await eventually(lambda: asked(bus, job, 2))
        assert [prompt for _, prompt in await asked(bus, job, 2)] == [1, 3]
        await answer(bus, job, 1, 0.5, 0.0)
        await answer(bus, job, 3, 0.5, 0.0)
        end = await ended(bus, job)
    assert (end.status.phase, end.status.step, end.status.total_steps) == ("succeeded", 4, 4)
    rows = [msgspec.json.decode(m.data) for m in await bus.read(subjects.METRICS, subjects.metrics(job))]
    assert [row["values"] for row in rows] == [
        {
            "eval/failed": 0.0, "eval/greedy": 0.5, "eval/avg@1": 0.5, "eval/missing": 0.0,
            "eval/greedy/addition": 2 / 3, "eval/avg@1/addition": 0.5, "eval/greedy/last": 0.0, "eval/avg@1/last": 0.5,
        }
    ]  # fmt: skip
    assert len(await bus.read(subjects.EXPERIENCE, subjects.experience(job))) == 4


async def test_a_timeout_names_the_number_of_unanswered_prompts(bus: Bus) -> None:
    record = await submit(bus, limits={"timeout_s": 1.0})
    async with leading(bus, record, 1) as runner:
        await answer(bus, record.id, 0, 1.0, 1.0)
        end = await ended(bus, record.id)
        assert [row["waiting_for"] for row in runner.why()][-1] == "3 of 4 prompts"
    assert end.status.phase == "failed"
    assert end.status.message == "limits.timeout_s: 3 of 4 prompts were not answered"


async def test_without_a_limit_the_longest_time_of_evaluations_is_named(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_runner, "LONGEST_S", 0.5)
    record = await submit(bus, limits={})
    async with leading(bus, record, 1):
        end = await ended(bus, record.id)
    assert end.status.phase == "failed"
    assert "that an evaluation may take without limits.timeout_s are over: 4 of 4 prompts" in end.status.message


async def test_nothing_scored_is_a_failure_with_the_scorers_error(bus: Bus) -> None:
    record = await submit(bus)
    async with leading(bus, record, 1):
        for prompt in range(4):
            await answer(bus, record.id, prompt, 0.0, 0.0, failed=True)
        end = await ended(bus, record.id)
    assert (end.status.phase, end.status.message) == ("failed", "nothing could be scored: scorer broke")


async def test_a_dead_ticket_counts_as_failed_and_is_stored(bus: Bus) -> None:
    record = await submit(bus)
    job = record.id
    async with leading(bus, record, 1) as runner:
        await eventually(lambda: asked(bus, job, 1))
        seq, prompt = (await asked(bus, job, 1))[1]
        await runner.on_dead_message(subjects.TICKETS, seq, None, reason="max deliveries", attempts=5)
        assert prompt not in runner.expected
        for other in sorted(runner.expected):
            await answer(bus, job, other, 1.0, 1.0)
        end = await ended(bus, job)
    assert end.status.phase == "succeeded"
    rows = [msgspec.json.decode(m.data) for m in await bus.read(subjects.METRICS, subjects.metrics(job))]
    assert rows[0]["values"]["eval/failed"] == 2.0
    assert len(await bus.read(subjects.DEAD, subjects.dead(job))) == 1
    assert len(await asked(bus, job, 1)) == 3


async def test_a_header_with_too_many_parts_deletes_no_other_messages(bus: Bus) -> None:
    record = await submit(bus)
    job = record.id
    await answer(bus, job, 0, 1.0, 1.0)
    (first,) = await bus.read(subjects.EXPERIENCE, subjects.experience(job))
    lie = msgspec.structs.replace(parse_group_header(first.headers), nbytes=5 << 20)
    lying = await bus.publish(subjects.experience(job), first.data, headers=group_headers(lie))
    others = [await bus.publish(subjects.experience("job_other"), b"kept") for _ in range(4)]
    async with leading(bus, record, 1):

        async def buried() -> bool:
            return bool(await bus.read(subjects.DEAD, subjects.dead(job)))

        await eventually(buried)
        await eventually(lambda: gone(bus, lying))
    kept = await bus.read(subjects.EXPERIENCE, subjects.experience("job_other"))
    assert [message.seq for message in kept] == others


async def gone(bus: Bus, seq: int) -> bool:
    return not await bus.get_many(subjects.EXPERIENCE, [seq])


async def test_a_worker_that_cannot_load_the_model_ends_the_job(bus: Bus) -> None:
    record = await submit(bus)
    async with leading(bus, record, 1):
        report = pack(Report(kind="failed", epoch=0, reason="no such model"), job=record.id)

        async def is_reported() -> bool:
            try:
                await bus.request(subjects.report(record.id), report, deadline_s=5)
            except ConnectionError:
                return False
            return True

        await eventually(is_reported)
        end = await JobStore(bus).get(record.id)  # the answer came after the record was written
    assert (end.status.phase, end.status.message) == ("failed", "no such model")


async def test_cancelling_ends_an_evaluation(bus: Bus) -> None:
    record = await submit(bus)
    async with leading(bus, record, 1) as runner:
        await eventually(lambda: asked(bus, record.id, 1))
        runner.update_record(await JobStore(bus).set_desired(record.id, "cancelled"))
        assert (await ended(bus, record.id)).status.phase == "cancelled"
