"""Two keys on one model: neither sees or ends the episodes of the other, nor takes all that both share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.services.coordinator.serving import gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCOPES = ["models:read", "inference:write", "episodes:write", "feedback:write", "jobs:read"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(agent: Any) -> AsyncIterator[Any]:
    """Run a coordinator that requires API keys, beside the first one, which does not."""
    async with agent.replica(api_keys="root") as replica:
        yield replica


async def key_of(front: Any, **more: Any) -> dict[str, str]:
    reply = await front.client.post("/v1/keys", json={"name": "k", "scopes": SCOPES, **more})
    assert reply.status_code == 201, reply.text
    return {"authorization": f"Bearer {reply.json()['key']}"}


def code(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


async def test_an_episode_belongs_to_its_key(agent: Any, front: Any) -> None:
    own, other = await key_of(front), await key_of(front)
    episode = (await front.client.post("/v1/episodes", json={"model": "agent"}, headers=own)).json()["id"]
    path, chat = f"/v1/episodes/{episode}", f"/e/{episode}/v1/chat/completions"
    assert (await agent.chat("hi", client=front.client, headers=own, path=chat)).status_code == 200
    for reply in (
        await front.client.get(path, headers=other),
        await front.client.post(f"{path}/end", headers=other),
        await front.client.post(f"{path}/keys", headers=other),
        await front.client.get(f"{path}/interactions", headers=other),
        await agent.chat("hi", client=front.client, headers=other, path=chat),
    ):
        assert code(reply) == (404, "not_found"), reply.text
    listed = [
        [row["id"] for row in (await front.client.get("/v1/episodes?model=agent", headers=key)).json()["data"]]
        for key in (own, other)
    ]
    assert listed == [[episode], []]
    assert episode in (await front.client.get("/v1/episodes?model=agent")).text, "admin sees those of all keys"
    assert (await front.client.get(f"{path}/interactions", headers=own)).json()["data"]
    assert (await agent.chat("hi", client=front.client, path=chat)).status_code == 200
    assert (await front.client.post(f"{path}/end", headers=own)).json()["ended_at"] is not None


async def test_a_key_that_opens_all_it_can_leaves_room_for_others(front: Any) -> None:
    flooder, other = await key_of(front), await key_of(front)
    book = front.gateway.episodes
    used = book._shares._used.total()
    book._max_bytes = book._shares.max_bytes = used + 10_000
    book._shares._share = 0.8
    try:
        for _ in range(30):
            reply = await front.client.post("/v1/episodes", json={"model": "agent"}, headers=flooder)
            if reply.status_code != 201:
                break
        assert code(reply) == (507, "episode_quota")
        again = await front.client.post("/v1/episodes", json={"model": "agent"}, headers=other)
        assert again.status_code == 201, again.text
    finally:
        book._max_bytes = book._shares.max_bytes = 64 << 20


async def test_one_key_does_not_take_a_whole_model(agent: Any, front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flooder, other = await key_of(front), await key_of(front)
    id = (await front.client.get("/v1/keys")).json()["data"]
    by_flooder = next(row["id"] for row in id if row["id"] in flooder["authorization"])
    monkeypatch.setattr(gateway, "MAX_IN_FLIGHT", 10)
    monkeypatch.setitem(front.gateway._in_flight, agent.job, 5)
    monkeypatch.setitem(front.gateway._of_key, (agent.job, by_flooder), 5)
    assert code(await agent.chat("hi", client=front.client, headers=flooder)) == (429, "capacity")
    assert (await agent.chat("hi", client=front.client, headers=other)).status_code == 200


async def test_tokens_of_a_key_are_bounded(agent: Any) -> None:
    async with agent.replica(api_keys="root", token_rate_limit="12/hour") as front:
        heavy, other = await key_of(front), await key_of(front)
        reply = await agent.chat("hi", client=front.client, headers=heavy)
        assert reply.status_code == 200
        for _ in range(6):
            if (reply := await agent.chat("hi", client=front.client, headers=heavy)).status_code != 200:
                break
        assert code(reply) == (429, "token_rate_limited")
        assert int(reply.headers["retry-after"]) >= 1
        assert (await agent.chat("hi", client=front.client, headers=other)).status_code == 200


async def test_keys_of_episodes_count_with_their_creator(agent: Any, front: Any) -> None:
    maker = await key_of(front, rate_limit="6/hour")
    keys = []
    for _ in range(2):
        body = {"model": "agent", "key": {}}
        created = (await front.client.post("/v1/episodes", json=body, headers=maker)).json()
        keys.append({"authorization": f"Bearer {created['api_key']}"})
    for _ in range(2):
        for key in keys:
            assert (await agent.chat("hi", client=front.client, headers=key)).status_code == 200
    for key in (*keys, maker):
        assert code(await agent.chat("hi", client=front.client, headers=key)) == (429, "rate_limited")
