"""Feedback posted twice has one effect, by its id or Idempotency-Key: at any replica, and after restarts."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.access import KeyStore
from penstock.services.coordinator.feedback import ingest
from penstock.services.coordinator.feedback.items import derived_id
from penstock.services.coordinator.feedback.privacy import Pseudonyms
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, FeedbackStatus


def verdict(live: Any, **more: Any) -> dict[str, Any]:
    return {"inference_id": live.new_id(), "metric_name": "accepted", "value": True, **more}


async def test_an_id_has_one_effect(live: Any) -> None:
    body = verdict(live, feedback_id=f"fb_{uuid.uuid4()}")
    replies = await asyncio.gather(*(live.post(body) for _ in range(20)))
    assert {reply.status_code for reply in replies} == {202}
    assert sorted(reply.json()["duplicate"] for reply in replies) == [False] + [True] * 19
    assert len({reply.json()["stream_seq"] for reply in replies}) == 1
    assert len(await live.items()) == 1
    other = await live.post({**body, "value": False})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "feedback_id_reused")
    again = await live.post({**body, "revision": 1})
    assert again.json()["duplicate"]
    newer = await live.post({**body, "value": False, "revision": 1})
    assert (newer.status_code, newer.json()["duplicate"]) == (202, False)
    assert (await live.post({**body, "value": True, "revision": 1})).status_code == 422
    assert [item.value for item in await live.items()] == [True, False]
    assert (await live.status_of(body["feedback_id"]))["revision"] == 1


async def test_a_batch_may_repeat_itself(live: Any) -> None:
    body = verdict(live, feedback_id=str(uuid.uuid4()))
    reply = await live.client.post("/v1/feedback/batch", json=[body, body, {**body, "value": False}])
    assert [(row["status"], row["duplicate"]) for row in reply.json()["data"]] == [
        (202, False), (202, True), (422, False),
    ]  # fmt: skip
    assert len(await live.items()) == 1


async def test_an_idempotency_key_has_one_effect_at_every_replica(open_live: Any, tmp_path: Path) -> None:
    """Another replica has not stored the reply, but derives the same item id from the Idempotency-Key."""
    async with open_live() as first, open_live(tmp_path / "other") as second:
        body = verdict(first)
        replies = await asyncio.gather(*(first.post(body, Idempotency_Key="k1") for _ in range(10)))
        ids = {reply.json()["feedback_id"] for reply in replies if reply.status_code == 202}
        assert {reply.status_code for reply in replies} <= {202, 409}
        assert len(ids) == 1
        await second.service.index.reach(1, 30)
        elsewhere = await second.post(body, Idempotency_Key="k1")
        assert (elsewhere.status_code, elsewhere.json()["duplicate"]) == (202, True)
        assert {elsewhere.json()["feedback_id"]} == ids
        changed = await second.post({**body, "value": False}, Idempotency_Key="k1")
        assert changed.status_code == 422
        batch = [verdict(first), verdict(first)]
        for expected in (False, True):
            reply = await first.client.post("/v1/feedback/batch", json=batch, headers={"Idempotency-Key": "k2"})
            assert [row["duplicate"] for row in reply.json()["data"]] == [expected] * 2
        assert len(await first.items()) == 3


async def test_a_restart_knows_everything(open_live: Any) -> None:
    async with open_live() as before:
        body = verdict(before, feedback_id=str(uuid.uuid4()))
        await before.post(body)
        await before.service.index.reach(1, 30)
    async with open_live() as meanwhile:
        other = verdict(meanwhile, feedback_id=str(uuid.uuid4()))
        await meanwhile.post(other)
    for file in meanwhile.service.index.directory.glob("*.sqlite*"):
        file.unlink()
    async with open_live() as after:
        for known in (body, other):
            assert (await after.post(known)).json()["duplicate"]
            assert (await after.status_of(known["feedback_id"]))["status"] == "received"
        assert len(await after.items()) == 2


async def test_recreated_streams_are_read_from_their_start(open_live: Any, bus: Any, nats_server: Any) -> None:
    """The index of the deleted stream is not used for the new one."""
    from penstock.shared.transport.jetstream import call

    async with open_live() as before:
        body = verdict(before, feedback_id=str(uuid.uuid4()))
        await before.post(body)
        await before.service.index.reach(1, 30)
    await call(bus._connection, "STREAM.DELETE.FEEDBACK", None, deadline_s=10, what="delete")
    await bus.ensure_streams(experience_bytes=64 << 20, stream_bytes=16 << 20)
    async with open_live() as after:
        assert (await after.client.get(f"/v1/feedback/{body['feedback_id']}")).status_code == 404
        assert not (await after.post(body)).json()["duplicate"]


async def test_unacknowledged_feedback_can_be_sent_again(
    live: Any, nats_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live.accept()
    monkeypatch.setattr(ingest, "ACK_S", 0.3)
    nats_server.kill()
    body = verdict(live)
    reply = await live.post(body, Idempotency_Key="k")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "ingest_unavailable")
    assert reply.headers["retry-after-ms"] == "1000"
    batch = await live.client.post("/v1/feedback/batch", json=[body, {**body, "value": False}])
    assert batch.status_code == 503
    monkeypatch.setattr(ingest, "ACK_S", 30.0)
    nats_server.start()
    assert (await live.post(body, Idempotency_Key="k")).status_code == 202
    assert (await live.post(body, Idempotency_Key="k")).headers["idempotent-replayed"] == "true"
    assert len(await live.items()) == 2


async def test_a_key_needs_the_scope(live: Any) -> None:
    keys = KeyStore(live.bus)
    body = verdict(live)
    for scopes, posted, retracted in (
        (["inference:write"], 403, 403),
        (["feedback:write"], 202, 403),
        (["feedback:write", "feedback:admin"], 202, 202),
    ):
        _, text = await keys.create("k", scopes, expires_at=None, rate_limit=None)
        bearer = {"authorization": f"Bearer {text}"}
        for path in ("/feedback", "/v1/feedback", "/v1/feedback/batch"):
            content = [body] if path.endswith("batch") else body
            reply = await live.client.post(path, json=content, headers=bearer)
            assert reply.status_code == (207 if reply.is_success and path.endswith("batch") else posted)
        id = (await live.accept())["feedback_id"]
        assert (await live.client.post(f"/v1/feedback/{id}/retract", headers=bearer)).status_code == retracted
    sources = {item.key_id for item in await live.items()}
    assert len(sources) == 3, "two keys, and requests without a key"


async def test_only_its_own_key_revises_an_item(live: Any) -> None:
    body = verdict(live, feedback_id=str(uuid.uuid4()))
    assert (await live.post(body)).status_code == 202
    _, text = await KeyStore(live.bus).create("k", ["feedback:write"], expires_at=None, rate_limit=None)
    hostile = {**body, "value": False, "revision": 9}
    for _ in range(2):  # first from memory, then from the index
        reply = await live.client.post("/v1/feedback", json=hostile, headers={"authorization": f"Bearer {text}"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "feedback_id_reused")
        await live.service.index.reach(1, 30)
        live.service.ingest.projected(1)
    assert (await live.post({**hostile, "revision": 1})).status_code == 202


async def test_an_item_id_cannot_be_derived_from_the_idempotency_key_alone(live: Any) -> None:
    """A client that could derive the id of another's item from its Idempotency-Key could use the id first."""
    digests = [Pseudonyms(live.bus), Pseudonyms(live.bus)]
    for secret, one in enumerate(digests):
        one._key = bytes([secret]) * 32
    assert len({derived_id(one.digest, "key", "idempotency", 0) for one in digests}) == 2


async def test_a_late_revision_is_shown_beside_the_status_of_its_item(live: Any) -> None:
    id = str(uuid.uuid4())
    await live.accept(feedback_id=id)
    trained = FeedbackStatus(feedback=id, status="trained", reason="feedback", ordinal=1, batch=2, version=3, time=1.0)
    await live.decide(trained)
    reply = await live.accept(feedback_id=id, inference_id=live.new_id(), revision=2)
    assert not reply["duplicate"]
    late = FeedbackStatus(feedback=id, status="rejected", reason="too_late", revision=2, time=2.0)
    await live.decide(late, trained)  # as after a change of leaders
    await live.decide(late)

    async def late_revision() -> bool:
        return bool((await live.status_of(id))["late_revision"])

    await live.until(late_revision, "late revision")
    found = await live.status_of(id)
    assert (found["status"], found["trained"], found["late_revision"]) == ("trained", {"step": 2, "version": 3}, 2)


async def test_what_arrives_after_the_end_of_a_job_is_rejected(live: Any) -> None:
    before, waits = await live.record(), (await live.accept())["feedback_id"]
    after, later = await live.record(ended=time.time() + 60), time.time() + 60
    late = Feedback(id=str(uuid.uuid4()), job=live.job, kind="metric", key_id="k", received=later, fingerprint="f")
    await live.bus.publish(subjects.feedback(live.job), pack(FeedbackBatch(items=[late]), job=live.job))
    finished = datetime.fromtimestamp(later - 30, UTC)
    await live.store.set_status(live.job, phase="succeeded", finished_at=finished)
    live.service.jobs.know((await live.store.index()).get(live.job))
    found = await live.status_of(late.id)
    assert (found["status"], found["reason"]) == ("rejected", "job_ended"), "no leader runs that could reject it"
    assert (await live.status_of(waits))["status"] == "received", "earlier items are for the leader to decide"
    for record, reason in ((before, None), (after, "job_ended")):
        shown = (await live.client.get(f"/v1/interactions/{record.id}")).json()["decision"]
        assert (shown and shown["reason"]) == reason


async def test_statuses_are_shown_and_counted(live: Any) -> None:
    ids = [(await live.accept())["feedback_id"] for _ in range(3)]
    await live.accept(metric_name="score", value=0.5)
    target = live.new_id()
    await live.decide(
        FeedbackStatus(feedback=ids[0], status="matched", interactions=[target], time=1.0),
        FeedbackStatus(feedback=ids[1], status="rejected", reason="stale", time=2.0),
    )
    await live.decide(
        FeedbackStatus(
            feedback=ids[0], status="trained", interactions=[target], ordinal=7, batch=3, version=4, time=3.0
        )
    )

    async def trained() -> Any:
        found = await live.status_of(ids[0])
        return found if found["status"] == "trained" else None

    found = await live.until(trained, "found")
    assert found["trained"] == {"step": 3, "version": 4}
    assert (found["ordinal"], found["interactions"]) == (7, [target])
    assert (await live.status_of(ids[1]))["reason"] == "stale"
    funnel = (await live.client.get(f"/v1/jobs/{live.job}/feedback")).json()
    assert funnel["items"] == 4
    assert funnel["by_status"] == {"received": 2, "rejected": 1, "trained": 1}
    assert {"metric": "score", "source": "local", "status": "received", "items": 1} in funnel["data"]
