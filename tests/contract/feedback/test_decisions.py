"""Decisions on interactions: shown by the id of the interaction, and counted by job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.services.coordinator.api.live import inference
from penstock.services.coordinator.feedback.index import POLL_S
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.interaction import Erasure, InteractionStatus, StatusBatch


async def decide(live: Any, *statuses: InteractionStatus) -> None:
    """Publish statuses of interactions, as the leader does."""
    batch = StatusBatch(items=[], interactions=list(statuses))
    await live.bus.publish(subjects.decisions(live.job), pack(batch, job=live.job))


async def decision(live: Any, id: str) -> Any:
    reply = await live.client.get(f"/v1/interactions/{id}")
    assert reply.status_code == 200, reply.text
    return reply.json()["decision"]


async def test_an_interaction_shows_its_decision(live: Any) -> None:
    trained, ignored, waits = [await live.record(text=text) for text in ("a", "b", "c")]
    assert await decision(live, trained.id) is None
    await decide(
        live,
        InteractionStatus(interaction=trained.id, status="admitted", reason="feedback", ordinal=7, time=1.0),
        InteractionStatus(interaction=ignored.id, status="rejected", reason="stale", time=1.0),
    )
    assert await decision(live, trained.id) == {
        "status": "admitted", "reason": "feedback", "ordinal": 7, "trained": None, "time": 1.0,
    }  # fmt: skip
    await decide(
        live,
        InteractionStatus(
            interaction=trained.id, status="trained", reason="feedback", ordinal=7, batch=3, version=4, time=2.0
        ),
        InteractionStatus(interaction=ignored.id, status="rejected", reason="episode_over", time=2.0),
        InteractionStatus(interaction=trained.id, status="rejected", reason="job_ended", time=3.0),
    )
    found = await decision(live, trained.id)
    assert (found["status"], found["trained"]) == ("trained", {"step": 3, "version": 4}), "the ledger says so"
    assert (await decision(live, ignored.id))["reason"] == "stale", "a later decision changes nothing"
    assert await decision(live, waits.id) is None
    reply = await live.client.get(f"/v1/episodes/{trained.episode}/interactions")
    assert [row["decision"]["status"] for row in reply.json()["data"]] == ["trained"]


async def test_a_record_is_shown_while_the_index_of_decisions_is_built_anew(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await live.record(text="kept")
    await decide(live, InteractionStatus(interaction=record.id, status="rejected", reason="stale", time=1.0))
    await asyncio.sleep(3 * POLL_S)  # no task checks any more whether the index has caught up
    live.service.index._caught_up.clear()
    with monkeypatch.context() as hurried:
        hurried.setattr(inference, "DECISION_S", 0.05)
        reply = await live.client.get(f"/v1/interactions/{record.id}")
    shown = reply.json()
    assert (reply.status_code, shown["text"]) == (200, "kept")
    assert (shown["decision"], shown["decision_known"]) == (None, False)
    live.service.index._caught_up.set()
    shown = (await live.client.get(f"/v1/interactions/{record.id}")).json()
    assert (shown["decision"]["reason"], shown["decision_known"]) == ("stale", True)


async def test_outcomes_are_counted_once_across_leaders(live: Any) -> None:
    records = [await live.record() for _ in range(3)]
    statuses = [
        InteractionStatus(interaction=one.id, status="rejected", reason="no_feedback", time=1.0) for one in records
    ]
    for _ in range(2):  # as after a change of leaders
        await decide(live, *statuses)
    await decision(live, records[0].id)  # the index has read them
    shown = (await live.client.get(f"/v1/jobs/{live.job}/feedback")).json()
    assert shown["interactions"] == [{"status": "rejected", "reason": "no_feedback", "interactions": 3}]
    erasure = Erasure(user="u", interactions=[records[0].id], feedback=[], time=1.0)
    await live.bus.publish(subjects.erasures(live.job), pack(erasure, job=live.job))

    async def forgotten() -> bool:
        shown = (await live.client.get(f"/v1/jobs/{live.job}/feedback")).json()
        return bool(shown["interactions"][0]["interactions"] == 2)

    await live.until(forgotten, "count without it")
