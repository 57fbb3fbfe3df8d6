"""The outcome of an interaction: asked by its id, counted by job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.services.coordinator.api.live import inference
from penstock.services.coordinator.feedback.index import LOOK_S
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.interaction import Erasure, InteractionStatus, StatusBatch


async def tell(desk: Any, *fates: InteractionStatus) -> None:
    """As the leader does."""
    batch = StatusBatch(items=[], interactions=list(fates))
    await desk.bus.publish(subjects.decisions(desk.job), pack(batch, job=desk.job))


async def decision(desk: Any, id: str) -> Any:
    reply = await desk.client.get(f"/v1/interactions/{id}")
    assert reply.status_code == 200, reply.text
    return reply.json()["decision"]


async def test_an_interaction_tells_what_became_of_it(desk: Any) -> None:
    trained, ignored, waits = [await desk.record(text=text) for text in ("a", "b", "c")]
    assert await decision(desk, trained.id) is None
    await tell(
        desk,
        InteractionStatus(interaction=trained.id, status="admitted", reason="feedback", ordinal=7, time=1.0),
        InteractionStatus(interaction=ignored.id, status="rejected", reason="stale", time=1.0),
    )
    assert await decision(desk, trained.id) == {
        "status": "admitted", "reason": "feedback", "ordinal": 7, "trained": None, "time": 1.0,
    }  # fmt: skip
    await tell(
        desk,
        InteractionStatus(
            interaction=trained.id, status="trained", reason="feedback", ordinal=7, batch=3, version=4, time=2.0
        ),
        InteractionStatus(interaction=ignored.id, status="rejected", reason="episode_over", time=2.0),
        InteractionStatus(interaction=trained.id, status="rejected", reason="job_ended", time=3.0),
    )
    found = await decision(desk, trained.id)
    assert (found["status"], found["trained"]) == ("trained", {"step": 3, "version": 4}), "the ledger says so"
    assert (await decision(desk, ignored.id))["reason"] == "stale", "a later leader looked again"
    assert await decision(desk, waits.id) is None
    reply = await desk.client.get(f"/v1/episodes/{trained.episode}/interactions")
    assert [row["decision"]["status"] for row in reply.json()["data"]] == ["trained"]


async def test_a_record_is_shown_while_the_index_of_decisions_is_built_anew(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await desk.record(text="kept")
    await tell(desk, InteractionStatus(interaction=record.id, status="rejected", reason="stale", time=1.0))
    await asyncio.sleep(3 * LOOK_S)  # nobody looks any more whether it has caught up
    desk.desk.index._caught_up.clear()
    with monkeypatch.context() as hurried:
        hurried.setattr(inference, "DECISION_S", 0.05)
        reply = await desk.client.get(f"/v1/interactions/{record.id}")
    shown = reply.json()
    assert (reply.status_code, shown["text"]) == (200, "kept")
    assert (shown["decision"], shown["decision_known"]) == (None, False)
    desk.desk.index._caught_up.set()
    shown = (await desk.client.get(f"/v1/interactions/{record.id}")).json()
    assert (shown["decision"]["reason"], shown["decision_known"]) == ("stale", True)


async def test_outcomes_are_counted_once_whoever_leads(desk: Any) -> None:
    records = [await desk.record() for _ in range(3)]
    fates = [
        InteractionStatus(interaction=one.id, status="rejected", reason="no_feedback", time=1.0) for one in records
    ]
    for _ in range(2):  # as after a change of leaders
        await tell(desk, *fates)
    await decision(desk, records[0].id)  # the index has read them
    shown = (await desk.client.get(f"/v1/jobs/{desk.job}/feedback")).json()
    assert shown["interactions"] == [{"status": "rejected", "reason": "no_feedback", "interactions": 3}]
    erasure = Erasure(user="u", interactions=[records[0].id], feedback=[], time=1.0)
    await desk.bus.publish(subjects.erasures(desk.job), pack(erasure, job=desk.job))

    async def forgotten() -> bool:
        shown = (await desk.client.get(f"/v1/jobs/{desk.job}/feedback")).json()
        return bool(shown["interactions"][0]["interactions"] == 2)

    await desk.until(forgotten, "count without it")
