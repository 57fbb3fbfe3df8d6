"""Unreadable messages of INTERACTIONS and FEEDBACK become dead letters once, and delay nothing else.

A message that becomes readable later counts once its dead letter is requeued.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.supply import LiveDeadLetter
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import Fenced
from penstock.shared.protocol import codec, subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import Admission, Admitted, Drawn, encode_events
from penstock.shared.protocol.live.interaction import (
    EPISODE_HEADER,
    Erasure,
    Feedback,
    FeedbackBatch,
    FeedbackStatus,
    Interaction,
    InteractionStatus,
)
from tests.live_leader import record_decided

Dlq = Callable[..., Awaitable[Any]]


class OlderItem(msgspec.Struct):
    """Feedback or an interaction as an older version defines it, with fewer kinds."""

    kind: Literal["none yet"]


class OlderBatch(msgspec.Struct):
    items: list[OlderItem]


@asynccontextmanager
async def led(live: Any, epoch: int, data_dir: Path) -> AsyncIterator[None]:
    """Lead the job of ``live``; leaving the block kills the leader. A failure of the leader fails the test."""
    record = await live.store.get(live.job)

    async def follow(runner: JobRunner) -> None:
        while True:
            runner.update_record(await live.store.get(live.job))
            await asyncio.sleep(0.05)

    async def lead() -> None:
        supply = LiveSupply(live.bus, live.job, OnlineJob.parse(record.spec), epoch=epoch)
        runner = JobRunner(
            live.bus, JobStore(live.bus), Members(), record, epoch=epoch, data_dir=data_dir, supply=supply
        )  # fmt: skip
        following = asyncio.create_task(follow(runner))
        try:
            await runner.lead()
        finally:
            following.cancel()

    async def lead_again() -> None:
        """Lead like a coordinator, which begins anew if an entry of the killed leader was still in flight."""
        while True:
            with contextlib.suppress(Fenced):
                await lead()
                return

    leading = asyncio.create_task(lead_again())
    try:
        yield
    finally:
        leading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leading


@pytest.fixture
def dlq(live: Any, url: str) -> Dlq:
    """Return a function that runs ``penstock dlq VERB JOB ...`` and checks its exit code."""

    async def run(verb: str, *words: object, code: int = 0) -> Any:
        env = {"PENSTOCK_URL": url, "PENSTOCK_API_KEY": ""}
        words = ("dlq", verb, live.job, *map(str, words))
        found = await asyncio.to_thread(CliRunner().invoke, cli, list(words), env=env)
        assert found.exit_code == code, found.output
        return found

    return run


async def test_an_unreadable_message_is_one_dead_letter(live: Any, dlq: Dlq, tmp_path: Path) -> None:
    async def dead_letters() -> list[dict[str, Any]]:
        return list(json.loads((await dlq("ls", "--json")).stdout))

    bus, broken = live.bus, live.new_id()
    record = await live.record()
    first = await bus.publish(subjects.feedback(live.job), b"\xff is no envelope")
    other = pack(FeedbackBatch(items=[]), job=live.job)
    second = await bus.publish(subjects.interaction(live.job, broken), other)
    good = (await live.accept(inference_id=record.id))["feedback_id"]
    waits = (await live.accept(inference_id=broken))["feedback_id"]

    async with led(live, 1, tmp_path):
        rows = await live.until(lambda: _both(dead_letters), "both dead letters")
        await live.until(lambda: _led(live, 1), "first leader")
        where = {(row["stream"], row["sequence"]): row for row in rows}
        assert set(where) == {(subjects.FEEDBACK, first), (subjects.INTERACTIONS, second)}
        assert "expected a Interaction, got a 'FeedbackBatch'" in where[subjects.INTERACTIONS, second]["reason"]
        assert {(row["attempts"], row["draw"]) for row in rows} == {(1, None)}
        dead_letter = where[subjects.FEEDBACK, first]
        shown = json.loads((await dlq("show", dead_letter["id"])).stdout)
        assert shown["content"] == "\\xff is no envelope"

        await live.until(lambda: _matched(live, good), "status of the item after it")
        assert (await live.status_of(waits))["status"] == "received", "its record cannot be read"
    async with led(live, 2, tmp_path):
        await live.until(lambda: _led(live, 2), "second leader")
        assert await dead_letters() == rows, "the second leader reads them again"
        assert "not an envelope" in (await dlq("replay", dead_letter["id"], code=1)).output
        assert await dead_letters() == rows, "a dead letter that is still unreadable stays"
        assert len(await bus.read(subjects.FEEDBACK, subjects.feedback(live.job))) == 3

    async def announced() -> list[str]:
        events = await bus.read(subjects.EVENTS, subjects.events(live.job))
        return [row["message"] for row in map(_json, events) if row["type"] == "dead_letter"]

    assert len(await announced()) == 2
    assert await bus.get(subjects.FEEDBACK, first), "a coordinator of another version may read it"


@pytest.mark.long
async def test_messages_readable_after_an_upgrade_count_once_replayed(
    live: Any, dlq: Dlq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader of an older version cannot read messages of the newer API, and its low-water mark passes them."""
    bus, job = live.bus, live.job

    async def dead_letters() -> list[dict[str, Any]]:
        return list((await live.client.get(f"/v1/jobs/{job}/dead-letters")).json()["data"])

    async def three() -> list[dict[str, Any]]:
        found = await dead_letters()
        return found if len(found) == 3 else []

    with monkeypatch.context() as older:
        older.setitem(codec._decoders, FeedbackBatch, msgspec.msgpack.Decoder(OlderBatch))
        older.setitem(codec._decoders, Interaction, msgspec.msgpack.Decoder(OlderItem))
        record = await live.record()
        feedback = (await live.accept(inference_id=record.id))["feedback_id"]
        long = {"kind": "interaction", "model": "policy", "completion": {"content": "x" * 1_200_000}}
        large = (await live.post(long)).json()["feedback_id"]
        async with led(live, 1, tmp_path):
            rows = await live.until(three, "three dead letters")
            await live.until(lambda: _led(live, 1), "first leader")
    low = [(await bus.stream_state(stream)).last_seq + 1 for stream in (subjects.INTERACTIONS, subjects.FEEDBACK)]
    passed = Admitted(writer_epoch=1, time=1.0, admissions=[], low_interactions=low[0], low_feedback=low[1])
    await bus.publish(subjects.ledger(job), encode_events([passed]))

    async with led(live, 2, tmp_path):
        await live.until(lambda: _led(live, 2), "second leader")
        for row in sorted(rows, key=lambda row: str(row["stream"]), reverse=True):
            assert "1 i" in (await dlq("replay", row["id"])).output
        await live.until(lambda: _matched(live, feedback), "status of the replayed item")
        await live.until(lambda: _has(live, large, "rejected"), "status of the item in several parts")
        assert await dead_letters() == []
        await dlq("replay", rows[0]["id"], code=1)

    first, second = await bus.read(subjects.INTERACTIONS, subjects.interactions(job))
    assert (first.subject, first.data) == (second.subject, second.data)
    assert second.headers[EPISODE_HEADER] == record.episode
    assert [item.id for item in await live.items()] == [feedback, large] * 2


async def test_decided_or_waiting_items_are_not_requeued(live: Any) -> None:
    """A leader forgets decisions below its low-water mark, so a requeued message could be trained on twice."""
    bus, job, gone = live.bus, live.job, live.new_id()
    ids = {name: live.new_id() for name in ("new", "waits", "expired", "trained", "deleted", "about")}

    def item(name: str, **more: Any) -> Feedback:
        more = {"inference": live.new_id(), "value": True, **more}
        return Feedback(
            id=ids[name], job=job, kind="metric", key_id="k", received=time.time(), metric="accepted", **more
        )  # fmt: skip

    async def leader() -> LiveSupply:
        supply = LiveSupply(bus, job, OnlineJob.parse((await live.store.get(job)).spec), epoch=1)
        await supply.recover(LedgerState())
        return supply

    async def newest() -> list[str]:
        return [item.id for item in (await live.stored())[-1]]

    await bus.publish(subjects.decisions(job), b"\xff is no envelope")
    await bus.publish(subjects.feedback(job), pack(FeedbackBatch(items=[item("waits")]), job=job))
    await record_decided(bus, job, FeedbackStatus(feedback=ids["expired"], status="expired", time=1.0))
    admission = Admission(0, {live.new_id(): 1}, {ids["trained"]: 1}, 1.0, 0, "k", "u", "feedback", 1.0)
    event = Admitted(writer_epoch=1, time=1.0, admissions=[admission], low_interactions=1, low_feedback=1)
    drawn = Drawn(writer_epoch=1, time=1.0, start=0, stop=1, min_version=0, deadline=2.0)
    await bus.publish(subjects.ledger(job), encode_events([drawn, event]))
    erasure = Erasure(user="u", interactions=[gone], feedback=[ids["deleted"]], time=1.0)
    await bus.publish(subjects.erasures(job), pack(erasure, job=job))
    items = [item(name) for name in ids if name != "about"] + [item("about", inference=gone)]
    dead_letter = LiveDeadLetter(subjects.FEEDBACK, 1, {}, pack(FeedbackBatch(items=items), job=job))
    assert await (await leader()).requeue(dead_letter) == 1
    assert await newest() == [ids["new"]]
    second = await leader()
    assert await second.requeue(dead_letter) == 0, "the next leader continues an interrupted replay"
    revised = pack(FeedbackBatch(items=[item("waits", revision=1)]), job=job)
    assert await second.requeue(LiveDeadLetter(subjects.FEEDBACK, 2, {}, revised)) == 1
    assert await newest() == [ids["waits"]]

    async def dead_letter_of(record: Interaction) -> LiveDeadLetter:
        message = await bus.last(subjects.INTERACTIONS, subjects.interaction(job, record.id))
        return LiveDeadLetter(subjects.INTERACTIONS, message.seq, message.headers, message.data)

    refused, waiting, lost = [await dead_letter_of(await live.record()) for _ in range(3)]
    status = InteractionStatus(interaction=_id_in(refused), status="rejected", reason="no_feedback", time=1.0)
    await record_decided(bus, job, interactions=[status])
    for dead_letter in (refused, lost):
        await bus.delete_message(subjects.INTERACTIONS, dead_letter.seq)
    third = await leader()
    assert [await third.requeue(one) for one in (refused, waiting, lost)] == [0, 0, 1]
    assert [await third.requeue(one) for one in (refused, waiting, lost)] == [0, 0, 0]


async def test_an_unreadable_record_loses_no_feedback_on_others(live: Any) -> None:
    """A correction of the unreadable record waits; the items after it in its message count."""
    broken, record = live.new_id(), await live.record()
    await live.bus.publish(subjects.interaction(live.job, broken), b"\xff is no envelope")
    correction = {"kind": "correction", "inference_id": broken, "corrected": {"role": "assistant", "content": "yes"}}
    verdict = {"inference_id": record.id, "metric_name": "accepted", "value": True}
    posted = await live.client.post("/v1/feedback/batch", json=[correction, verdict])
    assert posted.json()["accepted"] == 2
    (batch,) = await live.stored()
    assert [item.kind for item in batch] == ["correction", "metric"]

    spec = (await live.store.get(live.job)).spec
    online = {**spec["online"], "off_policy": {"supervised": {}}}
    supply = LiveSupply(live.bus, live.job, OnlineJob.parse({**spec, "online": online}), epoch=1)
    await supply.recover(LedgerState())
    await supply.flush()
    await live.until(lambda: _matched(live, batch[1].id), "status of the verdict")
    assert [one.stream for one in supply.unreadable()] == [subjects.INTERACTIONS]
    assert not supply.unreadable(), "published once"


async def _both(dead_letters: Any) -> list[dict[str, Any]]:
    found = await dead_letters()
    return found if len(found) == 2 else []


def _id_in(dead_letter: LiveDeadLetter) -> str:
    return codec.unpack(dead_letter.data, Interaction)[0].id


async def _matched(live: Any, feedback: str) -> bool:
    return bool((await live.status_of(feedback))["status"] == "matched")


async def _has(live: Any, feedback: str, status: str) -> bool:
    return bool((await live.status_of(feedback))["status"] == status)


async def _led(live: Any, attempt: int) -> bool:
    return bool((await live.store.get(live.job)).status.attempt == attempt)


def _json(message: Any) -> dict[str, Any]:
    return dict(json.loads(message.data))
