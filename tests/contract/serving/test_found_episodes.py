"""Conversations of stock clients, which name no episode: credited as one if the job asks for it, else turn by turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.live.interaction import bare_id


class Chat:
    """The client of a conversation; ``messages`` grows with each turn."""

    def __init__(self, agent: Any, **more: Any) -> None:
        self.agent, self.more = agent, more
        self.messages: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.episodes: list[str] = []

    async def ask(self, content: str, **more: Any) -> Any:
        """Send the next message; return the record of the answer, or None if the answer was not recorded."""
        self.messages.append({"role": "user", "content": content})
        reply = await self.agent.chat("", messages=self.messages, **self.more, **more)
        assert reply.status_code == 200, reply.text
        self.messages.append(reply.json()["choices"][0]["message"])
        self.episodes.append(bare_id(reply.headers["x-episode-id"]) or "")
        id = reply.json()["choices"][0]["interaction_id"]
        if id is None:
            return None
        self.ids.append(id)
        return await self.agent.recorded(id)


async def rewards(agent: Any) -> dict[str, float]:
    """Return the reward of each interaction whose trajectory a leader has ready once it has read the streams."""
    supply = LiveSupply(agent.bus, agent.job, OnlineJob.parse(agent.record.spec), epoch=1)
    await supply.recover(LedgerState())
    found = [trajectory for ready in supply.matching.ready.values() for trajectory in ready]
    return {turn.interaction.id: one.reward for one in found for turn in one.turns}


async def judge(agent: Any, id: str, **more: Any) -> None:
    body = {"inference_id": id, "metric_name": "reward", "value": 1.0, **more}
    reply = await agent.client.post("/v1/feedback", json=body)
    assert reply.status_code == 202, reply.text


@pytest.mark.long
async def test_an_unnamed_conversation_is_one_episode_if_the_job_asks(stack_of: Any) -> None:
    async with stack_of(episodes="found", gamma=0.5) as agent:
        talk, other = Chat(agent, user="bob"), Chat(agent, user="eve")
        async with agent.replica() as elsewhere:
            records = [
                await talk.ask("hi"), await talk.ask("again", client=elsewhere.client), await talk.ask("so"),
            ]  # fmt: skip
        other.messages = talk.messages[:2]
        await other.ask("again")
        assert {(one.episode, one.alone) for one in records} == {(talk.episodes[0], False)}
        assert other.episodes[0] != talk.episodes[0], "another user's"
        await judge(agent, talk.ids[2])
        assert await rewards(agent) == {}, "the episode may continue"
        await judge(agent, talk.ids[2], final=True, value=0.5)
        first = await rewards(agent)
        assert first == dict(zip(talk.ids, (0.125, 0.25, 0.5), strict=True))
        assert await rewards(agent) == first, "under every leader"


@pytest.mark.parametrize("unlinked", [{"store": False}, {"user": "says no"}])
async def test_unrecorded_or_untrained_answers_join_no_conversation(stack_of: Any, unlinked: dict[str, Any]) -> None:
    async with stack_of(episodes="found") as agent:
        talk = Chat(agent, **unlinked)
        records = [await talk.ask("hi"), await talk.ask("again")]
        assert len(set(talk.episodes)) == 2
        assert all(record is None or record.alone for record in records)


@pytest.mark.long
async def test_a_late_continuation_begins_an_episode(stack_of: Any) -> None:
    """The gateway opens a new episode, because a turn that a closed episode gets would not be trained on."""
    async with stack_of(episodes="found", idle_ttl_s=0.5) as agent, agent.replica() as elsewhere:
        talk = Chat(agent)
        await talk.ask("hi")
        await asyncio.sleep(0.6)
        for client in (elsewhere.client, agent.client):
            earlier = talk.messages[:]
            await talk.ask("again", client=client)
            talk.messages = earlier
        assert len(set(talk.episodes)) == 3


async def test_answers_are_credited_alone_by_default(stack_of: Any) -> None:
    async with stack_of() as agent:
        talk = Chat(agent, user="bob")
        records = [await talk.ask("hi"), await talk.ask("again")]
        assert {(one.episode, one.alone) for one in records} == {(talk.episodes[0], True)}
        await judge(agent, talk.ids[1])
        assert await rewards(agent) == {talk.ids[1]: 1.0}, "it waits for no further feedback"
