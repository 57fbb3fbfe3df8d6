"""Messages of INTERACTIONS and FEEDBACK that nobody can read: dead letters, once, and nothing else waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.members import Members
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.runner import JobRunner
from penstock.services.coordinator.store import JobStore
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.interaction import FeedbackBatch


@asynccontextmanager
async def led(desk: Any, epoch: int, data_dir: Path) -> AsyncIterator[None]:
    """The desk's job has a leader, until the end of the block kills it."""
    record = await desk.store.get(desk.job)
    supply = LiveSupply(desk.bus, desk.job, OnlineJob.parse(record.spec), epoch=epoch)
    runner = JobRunner(
        desk.bus, JobStore(desk.bus), Members(), record, epoch=epoch, data_dir=data_dir, supply=supply
    )  # fmt: skip
    leading = asyncio.create_task(runner.lead())
    try:
        yield
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


async def test_what_cannot_be_read_is_a_dead_letter_once(desk: Any, url: str, tmp_path: Path) -> None:
    async def dlq(*words: str) -> Any:
        env = {"PENSTOCK_URL": url, "PENSTOCK_API_KEY": ""}
        found = await asyncio.to_thread(CliRunner().invoke, cli, ["dlq", *words], env=env)
        assert found.exit_code == 0, found.output
        return found

    async def letters() -> list[dict[str, Any]]:
        return list(json.loads((await dlq("ls", desk.job, "--json")).stdout))

    bus, broken = desk.bus, desk.new_id()
    record = await desk.record()
    first = await bus.publish(subjects.feedback(desk.job), b"\xff is no envelope")
    other = pack(FeedbackBatch(items=[]), job=desk.job)
    second = await bus.publish(subjects.interaction(desk.job, broken), other)
    good = (await desk.accept(inference_id=record.id))["feedback_id"]
    waits = (await desk.accept(inference_id=broken))["feedback_id"]

    async with led(desk, 1, tmp_path):
        rows = await desk.until(lambda: _both(letters), "both letters")
        where = {(row["stream"], row["sequence"]): row for row in rows}
        assert set(where) == {(subjects.FEEDBACK, first), (subjects.INTERACTIONS, second)}
        assert "expected a Interaction, got a 'FeedbackBatch'" in where[subjects.INTERACTIONS, second]["reason"]
        assert {(row["attempts"], row["draw"]) for row in rows} == {(1, None)}
        letter = where[subjects.FEEDBACK, first]
        shown = json.loads((await dlq("show", desk.job, str(letter["id"]))).stdout)
        assert shown["content"] == "\\xff is no envelope"

        await desk.until(lambda: _matched(desk, good), "fate of what came after")
        assert (await desk.fate(waits))["status"] == "received", "its record cannot be read"
    async with led(desk, 2, tmp_path):
        await desk.until(lambda: _led(desk, 2), "second leader")
        assert await letters() == rows, "it has read them again"

    async def told() -> list[str]:
        events = await bus.read(subjects.EVENTS, subjects.events(desk.job))
        return [row["message"] for row in map(_json, events) if row["type"] == "dead_letter"]

    assert len(await told()) == 2
    assert await bus.get(subjects.FEEDBACK, first), "a coordinator of another version may read it"


async def test_an_unreadable_record_loses_nothing_that_was_said_of_others(desk: Any) -> None:
    """A correction of it only waits; what stands behind that in the same message counts."""
    broken, record = desk.new_id(), await desk.record()
    await desk.bus.publish(subjects.interaction(desk.job, broken), b"\xff is no envelope")
    correction = {"kind": "correction", "inference_id": broken, "corrected": {"role": "assistant", "content": "yes"}}
    verdict = {"inference_id": record.id, "metric_name": "accepted", "value": True}
    posted = await desk.client.post("/v1/feedback/batch", json=[correction, verdict])
    assert posted.json()["accepted"] == 2
    (batch,) = await desk.stored()
    assert [item.kind for item in batch] == ["correction", "metric"]

    spec = (await desk.store.get(desk.job)).spec
    online = {**spec["online"], "off_policy": {"supervised": {}}}
    supply = LiveSupply(desk.bus, desk.job, OnlineJob.parse({**spec, "online": online}), epoch=1)
    await supply.recover(LedgerState())
    await supply.flush()
    await desk.until(lambda: _matched(desk, batch[1].id), "fate of the verdict")
    assert [one.stream for one in supply.unreadable()] == [subjects.INTERACTIONS]
    assert not supply.unreadable(), "told once"


async def _both(letters: Any) -> list[dict[str, Any]]:
    found = await letters()
    return found if len(found) == 2 else []


async def _matched(desk: Any, feedback: str) -> bool:
    return bool((await desk.fate(feedback))["status"] == "matched")


async def _led(desk: Any, attempt: int) -> bool:
    return bool((await desk.store.get(desk.job)).status.attempt == attempt)


def _json(message: Any) -> dict[str, Any]:
    return dict(json.loads(message.data))
