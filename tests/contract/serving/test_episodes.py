"""Episodes: to which one a request belongs, and when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.services.coordinator.serving import episodes
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import FeedbackBatch, bare_id, job_mark, marked_id

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_episode_is_opened_used_and_ended(agent: Any) -> None:
    body = {"model": "agent", "split": "val", "tags": {"task": "t1"}, "group_id": "g"}
    opened = await agent.client.post("/v1/episodes", json=body)
    episode = opened.json()
    assert opened.status_code == 201, episode
    assert marked_id(episode["id"])[1] == job_mark(agent.job)
    path = episode["base_url"].removeprefix(agent.url) + "/chat/completions"
    response = await agent.chat("hi", path=path, headers={"X-Episode-Id": "another"}, metadata={"episode_id": "third"})
    assert response.headers["x-episode-id"] == episode["id"]
    record = await agent.recorded(response.headers["x-interaction-id"])
    assert (record.episode, record.split, record.alone) == (bare_id(episode["id"]), "val", False)
    assert record.tags == {"task": "t1", "group_id": "g"}
    assert (await agent.client.get(f"/v1/episodes/{episode['id']}")).json() == episode
    listed = (await agent.client.get("/v1/episodes", params={"model": "agent"})).json()
    assert episode["id"] in [row["id"] for row in listed["data"]]
    for _ in range(2):
        ended = await agent.client.post(f"/v1/episodes/{episode['id']}/end")
        assert ended.json()["ended_at"] is not None
    refused = await agent.chat("hi", path=path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "episode_over")
    messages = await agent.bus.read(subjects.FEEDBACK, subjects.feedback(agent.job))
    items = [item for message in messages for item in unpack(message.data, FeedbackBatch)[0].items]
    assert [(item.episode, item.metric, item.final) for item in items] == [(bare_id(episode["id"]), "", True)]


async def test_an_ended_episode_is_remembered_for_a_while_and_then_forgotten(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "KEEP_S", 1.0)
    long, short, ended = [
        (await agent.client.post("/v1/episodes", json={"model": "agent", "ttl_s": ttl_s})).json()["id"]
        for ttl_s in (100.0, 0.001, 100.0)
    ]
    assert (await agent.client.post(f"/v1/episodes/{ended}/end")).status_code == 200
    async with asyncio.timeout(30):
        for episode in (short, ended):
            while (await agent.client.get(f"/v1/episodes/{episode}")).status_code != 404:
                await asyncio.sleep(0.05)
    assert (await agent.client.get(f"/v1/episodes/{long}")).status_code == 200


async def test_an_episode_expires(agent: Any) -> None:
    episode = (await agent.client.post("/v1/episodes", json={"model": "agent", "ttl_s": 0.001})).json()
    response = await agent.chat("hi", path=f"/e/{episode['id']}/v1/chat/completions")
    assert response.status_code == 410


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"path": "/e/run-7/v1/chat/completions", "headers": {"X-Episode-Id": "header"}}, "run-7"),
        ({"headers": {"X-Episode-Id": "header"}, "metadata": {"episode_id": "meta"}}, "header"),
        ({"metadata": {"episode_id": "meta"}}, "meta"),
    ],
)
async def test_a_path_names_the_episode_before_a_header_and_metadata(
    agent: Any, more: dict[str, Any], expected: str
) -> None:
    response = await agent.chat("hi", **more)
    record = await agent.recorded(response.headers["x-interaction-id"])
    assert (response.headers["x-episode-id"], record.episode, record.alone) == (expected, expected, False)


async def test_a_chat_that_goes_on_stays_in_its_episode(agent: Any) -> None:
    first = await agent.chat("hi", user="bob")
    answer = first.json()["choices"][0]["message"]
    question = {"role": "user", "content": "hi"}
    later = {"messages": [question, {**answer, "extra": None}, {"role": "user", "content": "again"}], "user": "bob"}
    second = await agent.chat("", **later)
    assert second.headers["x-episode-id"] == first.headers["x-episode-id"]
    assert (await agent.recorded(second.headers["x-interaction-id"])).alone
    for other in (
        {**later, "user": "eve"},
        {**later, "messages": [question, {**answer, "content": "something else"}, question]},
        {"messages": [question], "user": "bob"},
    ):
        assert (await agent.chat("", **other)).headers["x-episode-id"] != first.headers["x-episode-id"]


async def test_episodes_that_do_not_exist(agent: Any) -> None:
    for id in ("nonsense", "ep_019300f4-0000-7000-8000-000000000000"):
        assert (await agent.client.get(f"/v1/episodes/{id}")).status_code == 404
        assert (await agent.client.post(f"/v1/episodes/{id}/end")).status_code == 404
    assert (await agent.client.post("/v1/episodes", json={"model": "nobody"})).status_code == 404
    assert (await agent.client.post("/v1/episodes", json={"model": "agent", "ttl_s": 0})).status_code == 422
