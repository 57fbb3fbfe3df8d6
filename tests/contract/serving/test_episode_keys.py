"""Keys of one episode, for browsers: for a limited time they allow chats and feedback in it, and nothing else."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest
import pytest_asyncio

from penstock.services.coordinator.serving import episodes
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.episode_keys import EpisodeGrant, episode_key, read_episode_key
from penstock.shared.protocol.live.interaction import FeedbackBatch, new_marked_id

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(agent: Any) -> AsyncIterator[Any]:
    """Run a coordinator that requires API keys, beside the first one, which does not."""
    async with agent.replica(api_keys="root") as replica:
        yield replica


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def opened(front: Any, **more: Any) -> tuple[str, dict[str, str]]:
    """Open an episode and create a key for it; return the id of the episode and the header with the key."""
    episode = (await front.client.post("/v1/episodes", json={"model": "agent"})).json()["id"]
    reply = await front.client.post(f"/v1/episodes/{episode}/keys", json=more)
    assert reply.status_code == 201, reply.text
    assert reply.headers["cache-control"] == "no-store"
    return episode, bearer(reply.json()["key"])


def code(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


async def judge(front: Any, key: dict[str, str], **about: Any) -> Any:
    return await front.client.post("/v1/feedback", json={"metric_name": "reward", "value": 1.0, **about}, headers=key)


async def test_a_key_allows_chats_and_feedback_in_its_episode(agent: Any, front: Any) -> None:
    episode, key = await opened(front)
    plain = await agent.chat("hi", client=front.client, headers=key)
    by_path = await agent.chat("hi", client=front.client, headers=key, path=f"/e/{episode}/v1/chat/completions")
    ids = [reply.headers["x-interaction-id"] for reply in (plain, by_path)]
    assert {reply.headers["x-episode-id"] for reply in (plain, by_path)} == {episode}
    for about in ({"inference_id": ids[0]}, {"episode_id": episode}):
        assert (await judge(front, key, **about)).status_code == 202
    batch = [{"metric_name": "reward", "value": 0.0, "inference_id": id} for id in ids]
    assert (await front.client.post("/v1/feedback/batch", json=batch, headers=key)).status_code == 207
    record = await agent.recorded(ids[0])
    other = await agent.chat("hi", client=front.client)
    assert record.key_id == (await agent.recorded(other.headers["x-interaction-id"])).key_id, "its maker's"

    listed = await front.client.get(f"/v1/episodes/{episode}/interactions")
    assert [row["id"] for row in listed.json()["data"]] == ids
    assert listed.json()["data"][0]["token_ids"] == record.token_ids
    page = (await front.client.get(f"/v1/episodes/{episode}/interactions", params={"limit": 1})).json()
    assert (page["has_more"], page["last_id"]) == (True, ids[0])
    rest = await front.client.get(f"/v1/episodes/{episode}/interactions", params={"after": ids[0]})
    assert [row["id"] for row in rest.json()["data"]] == ids[1:]


async def test_an_episode_is_opened_with_a_key(agent: Any, front: Any) -> None:
    again = {"Idempotency-Key": "with-a-key"}
    body = {"model": "agent", "key": {"expires_in_s": 60, "scopes": ["inference:write"]}}
    first, second = [await front.client.post("/v1/episodes", json=body, headers=again) for _ in range(2)]
    created = first.json()
    assert (first.status_code, first.headers["cache-control"]) == (201, "no-store"), first.text
    assert first.headers["location"] == f"/v1/episodes/{created['id']}"
    assert created["api_key"] != second.json()["api_key"], "a reply with a secret is not stored"
    end = datetime.fromisoformat(created["api_key_expires_at"]).timestamp()
    assert 50 < end - time.time() <= 60
    own = bearer(created["api_key"])
    path = created["base_url"].removeprefix(front.url) + "/chat/completions"
    turn = await agent.chat("hi", client=front.client, headers=own, path=path)
    assert turn.headers["x-episode-id"] == created["id"]
    assert code(await judge(front, own, episode_id=created["id"])) == (403, "missing_scope")
    plain = (await front.client.post("/v1/episodes", json={"model": "agent", "key": {}})).json()
    assert (await judge(front, bearer(plain["api_key"]), episode_id=plain["id"])).status_code == 202
    shown = (await front.client.get(f"/v1/episodes/{created['id']}")).json()
    assert shown == {name: value for name, value in created.items() if not name.startswith("api_key")}
    assert "api_key" not in (await front.client.post("/v1/episodes", json={"model": "agent"})).json()

    reply = await front.client.post("/v1/keys", json={"name": "k", "scopes": ["episodes:write", "feedback:write"]})
    maker = bearer(reply.json()["key"])
    count = len((await front.client.get("/v1/episodes?model=agent&limit=100")).json()["data"])
    for wanted, refused in (({}, (403, "missing_scope")), ({"scopes": []}, (422, "invalid_body"))):
        body = {"model": "agent", "key": wanted}
        assert code(await front.client.post("/v1/episodes", json=body, headers=maker)) == refused
    assert len((await front.client.get("/v1/episodes?model=agent&limit=100")).json()["data"]) == count
    body = {"model": "agent", "key": {"scopes": ["feedback:write"]}}
    assert (await front.client.post("/v1/episodes", json=body, headers=maker)).status_code == 201


async def test_a_key_allows_nothing_else(agent: Any, front: Any) -> None:
    episode, key = await opened(front)
    other, _ = await opened(front)
    elsewhere = await agent.chat("hi", client=front.client, path=f"/e/{other}/v1/chat/completions")
    about = elsewhere.headers["x-interaction-id"]
    for reply in (
        await agent.chat("hi", client=front.client, headers=key, path=f"/e/{other}/v1/chat/completions"),
        await agent.chat("hi", client=front.client, headers={**key, "X-Episode-Id": other}),
        await agent.chat("hi", client=front.client, headers=key, metadata={"episode_id": other}),
        await judge(front, key, episode_id=other),
        await judge(front, key, inference_id=about),
        await judge(front, key, inference_id=new_marked_id(agent.job)),
        await front.client.post(
            "/v1/feedback", json={"kind": "preference", "chosen": about, "rejected": about}, headers=key
        ),
        await front.client.post(
            "/v1/feedback", json={"kind": "interaction", "model": "agent", "completion": {"content": "x"}}, headers=key
        ),
        await front.client.post(
            "/v1/feedback",
            json={"kind": "preference", "model": "agent", "prompt_token_ids": [1], "chosen": "x", "rejected": "y"},
            headers=key,
        ),
    ):
        assert code(reply) == (403, "other_episode")
    for method, path in (
        ("GET", "/v1/jobs"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/episodes/{episode}"),
        ("GET", f"/v1/episodes/{episode}/interactions"),
        ("POST", f"/v1/episodes/{episode}/keys"),
        ("POST", f"/v1/episodes/{episode}/end"),
        ("POST", "/v1/keys"),
    ):
        reply = await front.client.request(method, path, headers=key)
        assert code(reply) == (403, "episode_key"), path


async def test_expired_and_forged_keys_and_keys_of_ended_episodes_are_refused(agent: Any, front: Any) -> None:
    episode, key = await opened(front)
    assert (await agent.chat("hi", client=front.client, headers=key)).status_code == 200
    secret = await front.gateway.episodes._bus.kv("privacy").get("episode-keys")
    grant = read_episode_key(key["authorization"].removeprefix("Bearer "), secret.value)
    assert grant is not None
    assert grant.episode == episode
    late = EpisodeGrant(episode, grant.maker, grant.scopes, int(time.time()) - 1)
    forged = episode_key(grant, b"another secret")
    for text in (episode_key(late, secret.value), forged, f"rle_{'A' * 40}.{'B' * 43}", "rle_"):
        reply = await agent.chat("hi", client=front.client, headers=bearer(text))
        assert code(reply) == (401, "invalid_api_key"), reply.text
        assert reply.headers["www-authenticate"]
    assert (await front.client.post(f"/v1/episodes/{episode}/end")).status_code == 200
    assert code(await agent.chat("hi", client=front.client, headers=key)) == (410, "episode_over")
    assert (await judge(front, key, episode_id=episode)).status_code == 202, "feedback on it may come later"
    assert code(await front.client.post(f"/v1/episodes/{episode}/keys")) == (410, "episode_over")


async def test_ids_chosen_with_a_key_count_in_its_episode_alone(agent: Any, front: Any) -> None:
    """One API key creates both episode keys, but the ids and Idempotency-Keys of an episode affect no other."""
    chosen = str(uuid.uuid4())
    stored = []
    for value in (1.0, 0.0):
        episode, key = await opened(front)
        about = {"episode_id": episode, "value": value, "feedback_id": chosen, "revision": 3}
        by_id = [await judge(front, key, **about) for _ in range(2)]
        assert [reply.status_code for reply in by_id] == [202, 202], by_id[0].text
        assert [reply.json()["duplicate"] for reply in by_id] == [False, True]
        post = {"metric_name": "reward", "value": value, "episode_id": episode}
        by_key = await front.client.post("/v1/feedback", json=post, headers={**key, "Idempotency-Key": "k"})
        assert (by_key.status_code, by_key.json()["duplicate"]) == (202, False), by_key.text
        stored += [by_id[0].json()["feedback_id"], by_key.json()["feedback_id"]]
    assert len({*stored, chosen}) == 5


async def test_a_key_does_not_outlive_the_record_of_its_episode(
    agent: Any, front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers in an evaluation episode that the gateway forgot would be recorded as trainable."""
    episode, key = await opened(front, expires_in_s=30 * 86400.0)
    monkeypatch.setattr(episodes, "KEEP_S", 60.0)
    shorter = await front.client.post(f"/v1/episodes/{episode}/keys", json={"expires_in_s": 30 * 86400.0})
    secret = await front.gateway.episodes._bus.kv("privacy").get("episode-keys")
    for text, days in ((key["authorization"].removeprefix("Bearer "), 8), (shorter.json()["key"], 1)):
        grant = read_episode_key(text, secret.value)
        assert grant is not None
        assert grant.expires - time.time() <= days * 86400.0 + 60
    known = front.gateway.episodes
    await known._kv.delete(episodes._key(agent.job, episode))
    known._known.clear()
    assert code(await agent.chat("hi", client=front.client, headers=key)) == (410, "episode_over")


async def test_a_key_allows_no_more_than_its_creator_and_ends_with_it(agent: Any, front: Any) -> None:
    created = await front.client.post("/v1/keys", json={"name": "k", "scopes": ["episodes:write", "feedback:write"]})
    maker = bearer(created.json()["key"])
    episode = (await front.client.post("/v1/episodes", json={"model": "agent"}, headers=maker)).json()["id"]
    keys = f"/v1/episodes/{episode}/keys"
    assert code(await front.client.post(keys, headers=maker)) == (403, "missing_scope")
    reply = await front.client.post(keys, json={"scopes": ["feedback:write"]}, headers=maker)
    key = bearer(reply.json()["key"])
    assert (await judge(front, key, episode_id=episode)).status_code == 202
    assert code(await agent.chat("hi", client=front.client, headers=key)) == (403, "missing_scope")
    await front.client.delete(f"/v1/keys/{created.json()['id']}")
    assert code(await judge(front, key, episode_id=episode)) == (401, "invalid_api_key")


async def test_unknown_episodes(front: Any) -> None:
    assert (await front.client.post("/v1/episodes/nonsense/keys")).status_code == 404
    assert (await front.client.get("/v1/episodes/nonsense/interactions")).status_code == 404
    unknown = "ep_019300f4-0000-7000-8000-000000000000"
    assert (await front.client.get(f"/v1/episodes/{unknown}/interactions")).json()["data"] == []


@pytest.mark.long
async def test_a_key_for_other_models_knows_nothing_of_this_one(agent: Any, front: Any) -> None:
    scopes = ["models:read", "inference:write", "episodes:write", "feedback:write", "jobs:read", "jobs:write"]
    scopes.append("feedback:admin")

    async def create(**more: Any) -> dict[str, str]:
        reply = await front.client.post("/v1/keys", json={"name": "k", "scopes": scopes, **more})
        assert reply.status_code == 201, reply.text
        return bearer(reply.json()["key"])

    own, light, other = await create(models=["agent"]), await create(max_weight=0.25), await create(models=["x", "y"])
    answered = await agent.chat("hi", client=front.client, headers=own)
    answer, spoken = answered.json()["id"], answered.headers["x-episode-id"]
    assert (await judge(front, own, inference_id=answer)).status_code == 202
    item = (await judge(front, light, inference_id=answer, weight=0.5)).json()["feedback_id"]
    less = (await judge(front, light, inference_id=answer, weight=0.125)).json()["feedback_id"]
    messages = await agent.bus.read(subjects.FEEDBACK, subjects.feedback(agent.job))
    weights = {one.id: one.weight for m in messages for one in unpack(m.data, FeedbackBatch)[0].items}
    assert (weights[item], weights[less]) == (0.25, 0.125)
    demonstration = {"metric_name": "demonstration", "value": "better"}
    for body in ({"kind": "correction", "corrected": {"content": "better"}}, demonstration):
        refused = await front.client.post("/v1/feedback", headers=light, json={"inference_id": answer, **body})
        assert code(refused) == (403, "limited_weight"), refused.text
        assert "max_weight" in refused.text
    names = [
        [row["id"] for row in (await front.client.get("/v1/models", headers=key)).json()["data"]]
        for key in (own, other)
    ]
    assert names == [["agent"], []]
    episode, _ = await opened(front)
    reads = (f"/v1/interactions/{answer}", f"/v1/episodes/{spoken}/interactions", f"/v1/feedback/{item}")
    for path in reads:
        assert (await front.client.get(path, headers=own)).status_code == 200, path
        assert code(await front.client.get(path, headers=other)) == (404, "not_found"), path
    assert code(await front.client.delete("/v1/users/eve/data", headers=own)) == (403, "other_model"), "in all models"
    for reply in (
        await agent.chat("hi", client=front.client, headers=other),
        await front.client.post(f"/v1/feedback/{item}/retract", headers=other),
        await front.client.post("/v1/models/agent/rollback", json={"version": 0}, headers=other),
        await front.client.post(f"/v1/models/{agent.job}/rollback", json={"version": 0}, headers=other),
        await front.client.get("/v1/models/agent", headers=other),
        await front.client.get("/v1/models/agent/versions", headers=other),
        await judge(front, other, inference_id=answer),
        await front.client.post("/v1/episodes", json={"model": "agent"}, headers=other),
        await front.client.get("/v1/episodes", params={"model": "agent"}, headers=other),
        await front.client.get(f"/v1/episodes/{episode}", headers=other),
        await front.client.post(f"/v1/episodes/{episode}/end", headers=other),
        await front.client.post(f"/v1/episodes/{episode}/keys", headers=other),
    ):
        assert code(reply) in {(404, "model_not_found"), (404, "not_found"), (422, "no_such_target")}, reply.text
        assert agent.job not in reply.text or agent.job in str(reply.request.url), (
            "replies reveal nothing of other models"
        )
    unknown = await front.client.get("/v1/models/nothing", headers=other)
    known = await front.client.get("/v1/models/agent", headers=other)
    assert known.json()["detail"] == unknown.json()["detail"].replace("nothing", "agent")
    token = {"metric_name": "reward", "inference_id": answer}
    signed = (await front.client.post("/v1/feedback/tokens", json=token, headers=other)).json()["token"]
    assert code(await judge(front, bearer(signed), inference_id=answer)) == (422, "no_such_target"), "nor do its tokens"
    assert (await front.client.post(f"/v1/feedback/{item}/retract", headers=own)).status_code == 202
