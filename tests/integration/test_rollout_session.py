"""Tickets on one rollout worker: answered, failed, late, repeated, and given back."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar

import pytest
from torch import Tensor

from penstock.services.env.service import EnvService
from penstock.services.rollout import tickets
from penstock.services.rollout.conversations.asking import Asking
from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.transformers import ModuleBatch
from penstock.services.rollout.session import RolloutSession
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, DeadlineError, StreamFull, ToolError
from penstock.shared.models import building as guard
from penstock.shared.models.building import building
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import ScoreReply, ScoreRequest, Ticket
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.protocol.trajectory import GroupHeader, parse_group_header
from penstock.shared.transport.bus import Bus, Delivery

JOB = "job_rollout"
PROMPTS = ["1" * 40 + "+1=", "1+2="]
"""The first prompt is longer than the model allows."""


class Worker:
    """A rollout worker of an evaluation job; its scorer answers once ``scores`` is set."""

    def __init__(self, bus: Bus, session: RolloutSession, spec: dict[str, Any]) -> None:
        self.bus, self.session, self.spec = bus, session, spec
        self.asked, self.scores = asyncio.Event(), asyncio.Event()
        self.task: asyncio.Task[None]

    async def score(self, data: bytes) -> bytes:
        request, envelope = unpack(data, ScoreRequest)
        self.asked.set()
        await self.scores.wait()
        number = len(request.completions)
        reply = ScoreReply(rewards=[1.0] * number, failed=[False] * number, parts={}, errors=[])
        return pack(reply, job=JOB, id=envelope.id)

    async def ask(self, ordinal: int, *, epoch: int = 1) -> None:
        ticket = Ticket(
            draw=Draw(ordinal), min_version=0, deadline=time.time() + 60, epoch=epoch, purpose="eval", version=0
        )  # fmt: skip
        await self.bus.publish(subjects.tickets(JOB), pack(ticket, job=JOB))

    async def groups(self) -> dict[int, GroupHeader]:
        messages = await self.bus.read(subjects.EXPERIENCE, subjects.experience(JOB), headers_only=True)
        headers = [parse_group_header(message.headers) for message in messages]
        assert len({header.draw for header in headers}) == len(headers), "one group of each draw"
        return {header.draw.ordinal: header for header in headers}

    async def tickets_left(self) -> int:
        return (await self.bus.stream_state(subjects.TICKETS)).messages


@asynccontextmanager
async def working(bus: Bus, directory: Path, prompts: Sequence[str] = PROMPTS, **changes: Any) -> AsyncIterator[Worker]:
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    spec = {
        "kind": "evaluation",
        "name": "measure",
        "model": {
            "config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "max_position_embeddings": 32},
            "tokenizer": "char",
        },
        "data": {"eval": {"type": "file", "path": str(rows)}},
        "reward": {"scorers": [{"type": "exact"}]},
        "sampling": {"max_new_tokens": 4},
        **changes,
    }
    worker = Worker(bus, RolloutSession(bus, ServiceSettings(worker_id="rollout-0"), JOB, parse_job(spec)), spec)
    server = await bus.serve(subjects.score(JOB), worker.score)
    task = worker.task = asyncio.create_task(worker.session.run())
    try:
        yield worker
        assert not task.done() or task.exception() is None, task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.close(0.5)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await holds():
            await asyncio.sleep(0.02)


async def test_a_ticket_that_fails_leaves_its_neighbours_alone(bus: Bus, tmp_path: Path) -> None:
    async with working(bus, tmp_path) as worker:
        await worker.ask(1)
        await asyncio.wait_for(worker.asked.wait(), 60)
        await worker.ask(0)

        async def answered(number: int) -> bool:
            return len(await worker.groups()) == number

        await until(lambda: answered(1))
        worker.scores.set()
        await until(lambda: answered(2))
        failed, good = [header for _, header in sorted((await worker.groups()).items())]
    assert (failed.skipped, failed.lengths) == ("", [])
    assert "43 prompt tokens + 4 new ones exceed the 32" in failed.error
    assert (set(good.rewards), any(good.failed), good.error) == ({1.0}, False, "")


async def test_a_worker_without_the_engine_takes_no_ticket_and_reports_it(bus: Bus, tmp_path: Path) -> None:
    assert importlib.util.find_spec("vllm") is None, "run this with an interpreter that has no vLLM"
    async with working(bus, tmp_path, rollout={"engine": "vllm"}) as worker:
        await worker.ask(1)

        async def is_reported() -> bool:
            return "engine 'vllm'" in worker.session.status().get("waiting_for", "")

        await until(is_reported)
        assert await worker.tickets_left() == 1
        assert not worker.session.busy
        worker.session.drain()
        await until(lambda: asyncio.sleep(0, worker.task.done()))


async def test_a_ticket_of_an_earlier_leader_is_answered(bus: Bus, tmp_path: Path) -> None:
    """NATS dropped the next leader's ticket for this recorded draw as a duplicate, so this ticket is the only one."""
    async with working(bus, tmp_path, ["1+1=", "1+2="]) as worker:
        worker.scores.set()

        async def answered(number: int) -> bool:
            return len(await worker.groups()) == number

        await worker.ask(1, epoch=2)
        await until(lambda: answered(1))
        await worker.ask(0, epoch=1)
        await until(lambda: answered(2))


@pytest.mark.parametrize("ticket_format", ["0.1", "now"])
async def test_a_fast_clock_of_a_worker_drops_nothing(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticket_format: str
) -> None:
    """Earlier, such a worker found each ticket late and acknowledged it without an answer: 40 of them in 0.1 s."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 130)
    assert await bus.measure_clock() == pytest.approx(130, abs=5)
    async with working(bus, tmp_path, ["1+1="] * 8) as worker:
        worker.scores.set()
        left = {"deadline_s": 60.0} if ticket_format == "now" else {}
        for i in range(8):
            ticket = Ticket(
                draw=Draw(i), min_version=0, deadline=real() + 60, epoch=1, purpose="eval", version=0, **left
            )
            await bus.publish(subjects.tickets(JOB), pack(ticket, job=JOB))

        async def answered() -> bool:
            assert await worker.tickets_left() + len(await worker.groups()) >= 8, (
                "a ticket was acknowledged without an answer"
            )
            return len(await worker.groups()) == 8

        await until(answered)


@pytest.mark.long
async def test_a_pause_of_the_engine_costs_no_ticket_its_lease(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a large version takes longer than a lease, and a ticket without deliveries left becomes a dead letter."""
    monkeypatch.setattr(tickets, "ACK_WAIT_S", 1.0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "max_position_embeddings": 4096}
    changes = {
        "model": {"config": shape, "tokenizer": "char"}, "placement": {"max_running": 1},
        "sampling": {"max_new_tokens": 3000, "min_new_tokens": 3000},
    }  # fmt: skip
    async with working(bus, tmp_path, ["1+2="], **changes) as worker:
        worker.scores.set()
        await worker.ask(0)

        async def decodes() -> bool:
            engine = worker.session._engine
            return engine is not None and engine.running > 0

        await until(decodes)
        engine = worker.session._engine
        assert engine is not None
        await engine.pause("keep")
        assert engine.running == 1
        other = await bus.pull(
            subjects.TICKETS, subjects.tickets(JOB), f"rollout-{JOB}", ack_wait_s=1.0, max_deliver=tickets.MAX_DELIVER
        )
        async with other:
            assert await other.fetch(1, 4.0) == [], "no other worker gets the ticket"
        await engine.resume()

        async def answered() -> bool:
            return list(await worker.groups()) == [0] and await worker.tickets_left() == 0

        await until(answered)


async def test_a_late_ticket_is_given_back(bus: Bus, tmp_path: Path) -> None:
    """Only the coordinator drops a draw, by its own clock."""
    await bus.measure_clock()
    async with working(bus, tmp_path, ["1+1=", "1+2="]) as worker:
        late = Ticket(
            draw=Draw(0), min_version=0, deadline=time.time() + 0.5, deadline_s=0.5, epoch=1, purpose="eval", version=0
        )  # fmt: skip
        await bus.publish(subjects.tickets(JOB), pack(late, job=JOB))
        await asyncio.wait_for(worker.asked.wait(), 60)

        async def given_up() -> bool:
            return not worker.session.busy

        await until(given_up)
        await worker.ask(1)
        worker.scores.set()

        async def answered() -> bool:
            return set(await worker.groups()) == {1}

        await until(answered)
        await bus.rtt()
        assert await worker.tickets_left() >= 1, "the late ticket was acknowledged"
        state = await bus.consumer_state(subjects.TICKETS, f"rollout-{JOB}")
        assert state.pending + state.ack_pending == 1


@pytest.mark.long
async def test_the_age_of_a_full_stream_grows(bus: Bus, tmp_path: Path) -> None:
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=16 << 20)
    with pytest.raises(StreamFull):
        while True:
            await bus.publish(subjects.experience("job_junk"), b"x" * 1000)
    async with working(bus, tmp_path) as worker:
        worker.scores.set()
        began = time.time()
        await worker.ask(1)

        async def blocked() -> bool:
            return "EXPERIENCE is full" in worker.session.status().get("waiting_for", "")

        await until(blocked)
        first = worker.session.status()["since"]
        await asyncio.sleep(0.5)
        assert worker.session.status()["since"] == first >= began
        await bus.purge(subjects.EXPERIENCE, subjects.experience("job_junk"))
        await until(lambda: has_group(worker))
        await until(lambda: is_free(worker))


async def has_group(worker: Worker) -> bool:
    return bool(await worker.groups())


async def is_free(worker: Worker) -> bool:
    return "since" not in worker.session.status()


async def test_every_held_draw_is_reported(bus: Bus, tmp_path: Path) -> None:
    """The coordinator takes a late draw for dead if no worker reports it as held."""
    ordinals = range(1, 100)
    async with working(bus, tmp_path, [PROMPTS[1]] * 100) as worker:
        for ordinal in ordinals:
            await worker.ask(ordinal)

        async def held(number: int) -> bool:
            return len(worker.session.status()["holds"]) == number

        await until(lambda: held(len(ordinals)))
        assert sorted(worker.session.status()["holds"]) == sorted(str(Draw(ordinal)) for ordinal in ordinals)
        worker.scores.set()
        await until(lambda: held(0))


async def test_a_ticket_is_taken_for_a_free_row(bus: Bus, tmp_path: Path) -> None:
    """Of six rows, a second group of four completions finds only two free; its ticket is taken all the same."""
    evaluation, placement = {"samples": 4, "greedy": False}, {"max_running": 6}
    async with working(bus, tmp_path, ["1+1=", "1+2="], evaluation=evaluation, placement=placement) as worker:
        await worker.ask(0)
        await worker.ask(1)

        async def held(number: int) -> bool:
            return len(worker.session.status()["holds"]) == number

        await until(lambda: held(2))
        worker.scores.set()
        await until(lambda: held(0))
        assert {ordinal: len(header.lengths) for ordinal, header in (await worker.groups()).items()} == {0: 4, 1: 4}


async def test_a_second_ticket_of_a_running_draw_ends_with_the_first(bus: Bus, tmp_path: Path) -> None:
    async with working(bus, tmp_path) as worker:
        await worker.ask(1)
        await asyncio.wait_for(worker.asked.wait(), 60)
        first = (await bus.stream_state(subjects.TICKETS)).last_seq
        await worker.ask(1)

        async def left(number: int) -> bool:
            return await worker.tickets_left() == number

        await until(lambda: left(1))
        assert (await bus.get(subjects.TICKETS, first)).seq == first, "the first ticket stays until it is answered"
        assert not await worker.groups(), "the first ticket is still in progress"
        worker.scores.set()
        await until(lambda: left(0))
        assert list(await worker.groups()) == [1]


class Guarded:
    """A user's engine that does not start; it records if another thread may build a model at the same time."""

    stop_ids = (2,)
    running = generated_tokens = 0
    alone: ClassVar[list[bool]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        self.alone.append(cannot_build())

    async def start(self) -> None:
        self.alone.append(cannot_build())
        await asyncio.to_thread(self.build)
        raise ConfigError("this engine does not start")

    def build(self) -> None:
        with building():
            self.alone.append(cannot_build())

    async def close(self) -> None:
        pass


def cannot_build() -> bool:
    """Return True if another thread that wants to build a model has to wait."""
    with ThreadPoolExecutor(1) as other:
        built = other.submit(lambda: guard._one_at_a_time.acquire(blocking=False)).result()
    if built:
        guard._one_at_a_time.release()
    return not built


async def test_no_other_model_is_built_while_a_users_own_engine_is_opened(bus: Bus, tmp_path: Path) -> None:
    Guarded.alone.clear()
    own = {"engine": "class", "path": f"{__name__}:Guarded"}
    async with working(bus, tmp_path, rollout=own) as worker:
        await until(lambda: asyncio.sleep(0, "take a failure" in worker.session.status().get("waiting_for", "")))
        assert Guarded.alone == [True, True, True]
        assert not cannot_build()


async def test_the_lease_of_a_ticket_outlasts_a_step_of_many_passes(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine `transformers` computes the rows of a step one after another, and no token counts until the last."""
    held, go_on = Queue[int](), threading.Semaphore(0)
    compute = ModuleBatch._next

    def one_by_one(batch: ModuleBatch, row: int, completion: Completion) -> Tensor:
        held.put(row)
        assert go_on.acquire(timeout=60)
        return compute(batch, row, completion)

    monkeypatch.setattr(ModuleBatch, "_next", one_by_one)
    async with working(bus, tmp_path, rollout={"engine": "transformers"}, evaluation={"samples": 3}) as worker:
        await worker.ask(1)
        seen = []
        for _ in range(3):
            await asyncio.to_thread(held.get, timeout=60)
            seen.append(worker.session._progress())
            go_on.release()
        go_on.release(100)
        worker.scores.set()
        await until(lambda: has_groups(worker, 1))
    assert seen == [0, 1, 2], "TicketTaker extends a lease if the number has changed"


async def has_groups(worker: Worker, number: int) -> bool:
    return len(await worker.groups()) == number


class Taker:
    """Takes tickets of a job, and answers each once ``ends`` is set."""

    def __init__(self, bus: Bus) -> None:
        self.begun: list[str] = []
        self.ends = asyncio.Event()
        self.tickets = tickets.TicketTaker(
            bus, JOB, Asking(bus), answer=self.answer, give_up=self.give_up, room=lambda: 1, progress=lambda: None
        )

    async def answer(self, ticket: Ticket, key: str) -> None:
        self.begun.append(key)
        await self.ends.wait()

    async def give_up(self, ticket: Ticket, key: str, reason: str) -> None:
        raise AssertionError(reason)


async def ask_for(bus: Bus, draw: Draw, *, deadline_s: float = 60.0) -> None:
    ticket = Ticket(draw=draw, min_version=0, deadline=0.0, deadline_s=deadline_s, epoch=1)
    await bus.publish(subjects.tickets(JOB), pack(ticket, job=JOB))


async def test_a_leaving_worker_gives_back_tickets_that_still_arrive(bus: Bus) -> None:
    """One of the tickets may be the one that the coordinator publishes again for a group in progress."""
    taker = Taker(bus)
    for draw in (Draw(0), Draw(0), Draw(1)):
        await ask_for(bus, draw)
    puller = await bus.pull(subjects.TICKETS, subjects.tickets(JOB), f"rollout-{JOB}", ack_wait_s=60.0, max_deliver=5)
    async with puller, asyncio.timeout(60):
        deliveries: list[Delivery] = []
        while len(deliveries) < 3:
            deliveries += await puller.fetch(3, 1.0)
        first, same, other = deliveries
        working = asyncio.create_task(taker.tickets._work(first))
        while not taker.begun:
            await asyncio.sleep(0)
        taker.tickets.drain()
        await taker.tickets._work(same)
        await taker.tickets._work(other)  # no coordinator answers
        again: list[Delivery] = []
        while len(again) < 2:
            again += await puller.fetch(2, 1.0)
        assert sorted((one.seq, one.deliveries) for one in again) == [(same.seq, 2), (other.seq, 2)]
        assert taker.begun == ["train:0.0"]
        taker.ends.set()
        await working


async def test_a_leaving_worker_fetches_no_tickets(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "FETCH_WAIT_S", 3600.0)
    taker = Taker(bus)
    task = asyncio.create_task(taker.tickets.run())
    await until(lambda: asyncio.sleep(0.01, bool(taker.tickets._idle)))
    taker.tickets.drain()
    taker.tickets.drain()
    await asyncio.wait_for(task, 30)


class NoVersion:
    """Policy whose next version never arrives."""

    version = 0

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def reach(self, wanted: Callable[[int], bool], *, deadline_s: float, what: str) -> None:
        self.asked.set()
        try:
            await asyncio.wait_for(asyncio.Event().wait(), deadline_s)
        except TimeoutError:
            raise DeadlineError(what) from None


async def test_a_leaving_worker_gives_back_a_ticket_that_waits_for_a_version(bus: Bus) -> None:
    """The ticket has an hour left, and another worker may already serve its version."""
    taker, policy = Taker(bus), NoVersion()

    async def answer(ticket: Ticket, key: str) -> None:
        await taker.tickets.reach(policy, ticket, key, oldest=1)

    taker.tickets._answer = answer
    await ask_for(bus, Draw(0), deadline_s=3600.0)
    running = asyncio.create_task(taker.tickets.run())
    await asyncio.wait_for(policy.asked.wait(), 60)
    taker.tickets.drain()
    await asyncio.wait_for(running, 60)
    puller = await bus.pull(subjects.TICKETS, subjects.tickets(JOB), f"rollout-{JOB}", ack_wait_s=60.0, max_deliver=5)
    async with puller, asyncio.timeout(60):
        while not (again := await puller.fetch(1, 1.0)):
            pass
    assert [one.deliveries for one in again] == [2]


async def test_a_version_that_comes_too_late_is_no_hand_over(bus: Bus) -> None:
    taker = Taker(bus)
    taker.tickets._ends["key"] = 0.0
    ticket = Ticket(draw=Draw(0), min_version=1, deadline=0.0, epoch=1)
    with pytest.raises(DeadlineError):
        await taker.tickets.reach(NoVersion(), ticket, "key", oldest=1)
    taker.tickets.drain()
    with pytest.raises(tickets.HandedOver, match="leaves"):
        await taker.tickets.reach(NoVersion(), ticket, "key", oldest=1)


TURN_S = 2.5
AGENT: dict[str, Any] = {
    "model": {
        "config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "max_position_embeddings": 64},
        "tokenizer": "char",
        "characters": "12+=[]",
    },
    "environment": {
        "tools": [{"type": "calculator"}], "max_turns": 2, "max_observation_tokens": 8,
        "calls": {"begin": "[", "end": "]", "body": "text", "parallel": False},
        "turn_timeout_s": TURN_S, "tool_timeout_s": TURN_S,
    },
    "sampling": {"max_new_tokens": 32, "temperature": 1.0},
    "evaluation": {"samples": 16, "greedy": False},
}  # fmt: skip


@pytest.mark.long
async def test_episodes_wait_for_an_env_worker_and_outlive_one_that_refuses(bus: Bus, tmp_path: Path) -> None:
    """Waiting for an env worker does not count as time of a turn; a refused call fails one trajectory."""
    calls: list[str] = []

    async def carry_out(data: bytes) -> bytes:
        request, envelope = unpack(data, ToolRequest)
        assert request.start_by < time.time() + 60
        calls.append(envelope.id)
        if envelope.id == calls[0]:
            raise ToolError("not this one")
        return pack(ToolReply(status="ok", text="2"), job=JOB, id=envelope.id)

    async with working(bus, tmp_path, **AGENT) as worker:
        worker.scores.set()
        await worker.ask(1)

        async def waiting() -> bool:
            return bool(worker.session.status().get("waiting_for") == "an env worker")

        await until(waiting)
        await asyncio.sleep(1.2 * TURN_S)
        assert not await worker.groups()
        server = await bus.serve(subjects.tools(JOB), carry_out)

        async def answered() -> bool:
            return len(await worker.groups()) == 1

        await until(answered)
        [group] = (await worker.groups()).values()
        await server.close(0.5)
    assert len(set(calls)) > 1
    assert sum(group.failed) == 1
    assert "not this one" in group.error


SHELF = """
import os, time
from pathlib import Path

class Shelf:
    def __init__(self, seed, row):
        self.put_there, self.room = 0, Path(os.environ["SHELF"])

    def put(self, what):
        self.put_there += 1
        if self.put_there == 2:
            (self.room / "second").touch()
            while not (self.room / "open").exists():
                time.sleep(0.01)
        return str(self.put_there)
"""
PUT: dict[str, Any] = {
    "type": "method", "name": "put", "path": "shelf_of_a_user:Shelf", "description": "keeps",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
}  # fmt: skip


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.long
async def test_tool_states_are_lost_with_their_env_worker(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """An episode with a lost state restarts on another env worker or fails; none continues with another state."""
    (tmp_path / "shelf_of_a_user.py").write_text(SHELF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SHELF", str(tmp_path))
    monkeypatch.setattr("penstock.services.rollout.env_requests.HOLDER_LOST_S", 0.3)
    limits = {"turn_timeout_s": 60, "tool_timeout_s": 30, "restarts": restarts, "max_turns": 3}
    many = {"samples": 96, "greedy": False}  # so many that some call twice
    agent = {**AGENT, "environment": {**AGENT["environment"], **limits, "tools": [PUT]}, "evaluation": many}

    @asynccontextmanager
    async def env_worker() -> AsyncIterator[None]:
        task = asyncio.create_task(EnvService(bus, ServiceSettings()).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async with working(bus, tmp_path, **agent) as worker:
        record = JobRecord(id=JOB, name="measure", created_at=datetime.now(UTC), spec=worker.spec)
        await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
        worker.scores.set()
        async with env_worker():
            await worker.ask(1)

            async def held() -> bool:
                return (tmp_path / "second").exists()

            await until(held)
            assert not await worker.groups()
        (tmp_path / "open").touch()
        async with env_worker():

            async def answered() -> bool:
                return len(await worker.groups()) == 1

            await until(answered)
    [group] = (await worker.groups()).values()
    assert any(group.failed) == (restarts == 0)
    assert not all(group.failed)
    assert ("environment.restarts: 0" in group.error) == (restarts == 0)
