"""A flood of one key on a real bus: other clients are not delayed, and their posts find room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from penstock.services.coordinator.online import record_lookup as reader_module
from penstock.services.coordinator.online import supply as supply_module
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.retry import Retry
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import (
    Erasure,
    Feedback,
    FeedbackBatch,
    FeedbackStatus,
    Interaction,
    StatusBatch,
    new_marked_id,
)
from penstock.shared.transport.bus import Bus
from tests.live_leader import Recorder

DEADLINE_S = 40
STREAM_BYTES = 4 << 20
JOB = "job_x"
CONFIG = OnlineJob.parse(
    {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 2, "max_lag": 1},
        "online": {"max_wait_s": 3600, "off_policy": {"supervised": {}, "preference": {}, "max_share": 1.0}},
    }
)  # fmt: skip


async def serve(bus: Bus, name: str, *, alone: bool = True) -> None:
    """Publish the record of one answer."""
    now = time.time()
    record = Interaction(
        id=name, request=name, index=0, job=JOB, episode=new_marked_id(JOB), alone=alone, key_id="k", user="u",
        split="train", untrainable="", prompt_ids=[4, 5], token_ids=[hash(name) % 99, 7], logprobs=[-0.1, -0.2],
        spans=[Span(0, 0, 2)], sampling=Sampling(max_new_tokens=4), finish="stop", template="t", body_digest="b",
        text="ab", started=now, first_token=now, ended=now,
    )  # fmt: skip
    await bus.publish(subjects.interaction(JOB, name), pack(record, job=JOB), msg_id=name)


def preference(chosen: str, rejected: str) -> Feedback:
    return Feedback(
        id=new_marked_id(JOB), job=JOB, kind="preference", key_id="k", received=time.time(), inference=chosen,
        body={"chosen": chosen, "rejected": rejected, "strength": 1.0},
    )  # fmt: skip


async def post_feedback(bus: Bus, *items: Feedback) -> None:
    await bus.publish(subjects.feedback(JOB), pack(FeedbackBatch(items=list(items)), job=JOB))


@pytest.fixture
def asked(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Subjects whose newest message was requested; fails if more than ``AT_ONCE`` requests run at a time."""
    found, last, running = list[str](), bus.last, 0

    async def counted(stream: str, subject: str) -> Any:
        nonlocal running
        found.append(subject)
        running += 1
        assert running <= reader_module.AT_ONCE
        try:
            return await last(stream, subject)
        finally:
            running -= 1

    monkeypatch.setattr(bus, "last", counted)
    return found


async def test_unknown_names_are_looked_up_once(bus: Bus, asked: list[str]) -> None:
    names = [new_marked_id(JOB) for _ in range(512)]
    flood = [preference(*names[place : place + 2]) for place in range(0, 512, 2)]
    for _ in range(2):
        await post_feedback(bus, *flood)
    await post_feedback(bus, *(preference(*names[place : place + 2]) for place in range(0, 512, 2)))
    supply = LiveSupply(bus, JOB, CONFIG, epoch=1)
    await supply.recover(LedgerState())
    assert len([subject for subject in asked if subject.startswith(subjects.INTERACTIONS.lower())]) == 512
    assert len(supply.matching.examples.items) == 512


async def test_an_unknown_name_is_found_once_it_exists(bus: Bus, asked: list[str]) -> None:
    """An item may arrive before the answer that it names, or after it."""
    pair = [new_marked_id(JOB) for _ in range(2)]
    supply = LiveSupply(bus, JOB, CONFIG, epoch=1)
    early, late = preference(*pair), preference(*pair)
    await post_feedback(bus, early)
    await supply.recover(LedgerState())
    assert len(set(asked) & {subjects.interaction(JOB, name) for name in pair}) == 2
    for name in pair:
        await serve(bus, name)
    for message in await bus.read(subjects.INTERACTIONS, subjects.interactions(JOB)):
        await supply._take_message(subjects.interactions(JOB), message)
    assert not supply.matching.examples.missing_records(early)
    supply.matching.examples.remove(early.id)
    supply.matching.examples.discard_unused_records()
    assert supply.matching.examples.missing_records(late), "no example waits for it any more"
    await post_feedback(bus, late)
    *_, message = await bus.read(subjects.FEEDBACK, subjects.feedback(JOB))
    await supply._take_message(subjects.feedback(JOB), message)
    assert not supply.matching.examples.missing_records(late)


async def test_a_lookup_waits_and_reports_while_the_bus_is_away(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    supply, last, is_away = LiveSupply(bus, JOB, CONFIG, epoch=1), bus.last, True
    retry = supply.retry = Retry(JOB)  # in the form in which the leader's waits are shown

    async def away(stream: str, subject: str) -> Any:
        if is_away:
            raise Unavailable("the bus is away")
        return await last(stream, subject)

    monkeypatch.setattr(bus, "last", away)
    names = [new_marked_id(JOB) for _ in range(3)]
    await serve(bus, names[0])
    looking = asyncio.create_task(supply._reader.by_name(names))
    async with asyncio.timeout(DEADLINE_S):
        while retry.blocked is None:
            await asyncio.sleep(0.01)
        assert retry.blocked.what == reader_module.LOOKUP
        assert len(retry._held) == 1
        is_away = False
        assert list(await looking) == names[:1]
    assert retry.blocked is None


async def test_a_flood_queues_a_bounded_number_of_messages(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_module, "MAX_UNTAKEN", 3)
    supply, posted = LiveSupply(bus, JOB, CONFIG, epoch=1), asyncio.Queue[Any]()
    monkeypatch.setattr(supply_module, "SWEEP_S", 3600)
    for _ in range(10):
        await post_feedback(bus, preference(new_marked_id(JOB), new_marked_id(JOB)))
    async with following(supply, posted.put):
        async with asyncio.timeout(DEADLINE_S):
            while posted.qsize() < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert posted.qsize() == 3
            while len(supply.matching.examples.items) < 10:
                await (await posted.get())()


async def statuses(bus: Bus) -> dict[str, FeedbackStatus]:
    messages = await bus.read(subjects.DECISIONS, subjects.decisions(JOB))
    return {status.feedback: status for message in messages for status in unpack(message.data, StatusBatch)[0].items}


def turn(name: str, key: str, size: int) -> Feedback:
    """Return a turn of an episode that no client ends."""
    return Feedback(
        id=name, job=JOB, kind="interaction", key_id=key, received=time.time(), episode=f"e-{name}", turn=0,
        body={"prompt_token_ids": [7], "token_ids": [300] * size},
    )  # fmt: skip


def metric(name: str, about: str = "") -> Feedback:
    return Feedback(
        id=name, job=JOB, kind="metric", key_id="rater", received=time.time(), inference=about or new_marked_id(JOB),
        metric="reward", value=1.0,
    )  # fmt: skip


async def post(bus: Bus, subject: str, data: bytes) -> None:
    """Publish as soon as there is room."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(StreamFull):
                await bus.publish(subject, data)
                return
            await asyncio.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("waits", ["nothing", "turn", "metric", "episode"])
async def test_a_key_that_fills_the_stream_leaves_room_for_others(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """Undecided items of other keys, posted earlier, prevent the removal of all messages after them."""
    monkeypatch.setattr(supply_module, "SWEEP_S", 0.05)
    monkeypatch.setattr(supply_module, "ROOM_EVERY_S", 0.05)
    await bus.ensure_streams(experience_bytes=STREAM_BYTES, stream_bytes=STREAM_BYTES)
    supply, tasks = LiveSupply(bus, JOB, CONFIG, epoch=1), asyncio.Queue[Any]()
    about = new_marked_id(JOB)
    if waits == "episode":
        await serve(bus, about, alone=False)
    if waits != "nothing":
        await post_feedback(bus, turn("first", "other", 2) if waits == "turn" else metric("first", about))
    recorder = Recorder(bus, supply)
    await recorder.lead()

    async def lead() -> None:
        while True:
            await (await tasks.get())()
            while not tasks.empty():  # like the runner: all messages that are here, then a decision
                await tasks.get_nowait()()
            await recorder.record()

    leading = asyncio.create_task(lead())
    try:
        async with following(supply, tasks.put):
            for number in range(3 * STREAM_BYTES // 90_000):
                data = pack(FeedbackBatch(items=[turn(f"f{number}", "flood", 30_000)]), job=JOB)
                await post(bus, subjects.feedback(JOB), data)
            await post(bus, subjects.feedback(JOB), pack(FeedbackBatch(items=[metric("late")]), job=JOB))
            gone = Erasure(user="u", interactions=[], feedback=["f0"], time=time.time())
            await post(bus, subjects.erasures(JOB), pack(gone, job=JOB))
            async with asyncio.timeout(DEADLINE_S):
                while not len(supply.matching.unmatched):
                    await asyncio.sleep(0.02)
    finally:
        leading.cancel()
    await recorder.record()
    newest_statuses = await statuses(bus)
    assert newest_statuses["f0"].reason == "too_many_waiting"
    if waits != "nothing":
        assert (newest_statuses["first"].status, newest_statuses["first"].reason) == ("rejected", "feedback_full")
    assert (await bus.stream_state(subjects.FEEDBACK)).bytes < STREAM_BYTES
    assert supply.matching.examples.quota.nbytes <= STREAM_BYTES / 8 + 100_000


async def test_the_largest_key_is_rejected_first(bus: Bus) -> None:
    supply = LiveSupply(bus, JOB, CONFIG, epoch=1)
    await post_feedback(bus, turn("a0", "small", 2))
    for number in range(4):
        await post_feedback(bus, turn(f"b{number}", "large", 100))
    await post_feedback(bus, turn("a1", "small", 2))
    await supply.recover(LedgerState())
    here = await bus.stream_state(subjects.FEEDBACK)

    def given_up(share: float) -> list[tuple[str, str]]:
        state = replace(here, bytes=int(share * here.max_bytes))
        return [(one.feedback, one.reason) for one in supply._relieve_feedback(state, time.time())]

    assert given_up(0.7) == []
    assert given_up(0.8) == [("b0", "feedback_full"), ("b1", "feedback_full")]
    assert supply.matching.low_water()[1] == 1
    assert given_up(0.95) == [("a0", "feedback_full")], "everything in the older half"
    assert list(supply.matching.examples.items) == ["b2", "b3", "a1"]


@asynccontextmanager
async def following(supply: LiveSupply, post: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(supply.follow(post))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
