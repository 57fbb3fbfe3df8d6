"""Each choice of a request is its own interaction, and the client learns its id."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import Interaction

pytestmark = pytest.mark.asyncio(loop_scope="module")

FREE = {"model": "agent", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
CHAT = {**FREE, "messages": [{"role": "user", "content": "?"}], "n": 3}
TEXTS = {**FREE, "prompt": ["?", "hi"], "n": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXTS)])
async def test_each_choice_names_its_interaction(agent: Any, path: str, body: dict[str, Any], stream: bool) -> None:
    reply = await agent.client.post(path, json={**body, "stream": stream})
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        choices = [choice for line in lines[:-1] for choice in orjson.loads(line)["choices"]]
    else:
        choices = reply.json()["choices"]
    tokens: dict[tuple[int, str], list[int]] = {}
    for choice in choices:
        tokens.setdefault((choice["index"], choice["interaction_id"]), []).extend(choice["token_ids"])
    number = body["n"] * len(body.get("prompt", "?"))
    assert sorted(index for index, _ in tokens) == list(range(number)), "each part of a choice names the same one"
    names = [name for _, name in sorted(tokens)]
    assert names[0] == reply.headers["x-interaction-id"]
    for (place, name), sampled in tokens.items():
        record, first = await agent.recorded(name), names[place - place % body["n"]]
        assert (record.index, record.request, record.token_ids) == (place % body["n"], first, sampled)


@pytest.mark.parametrize("stream", [False, True])
async def test_unrecorded_answers_name_no_interaction(agent: Any, stream: bool) -> None:
    reply = await agent.chat("hi", n=2, store=False, stream=stream)
    text = reply.text.removeprefix("data: ").partition("\n\n")[0]
    assert {choice["interaction_id"] for choice in orjson.loads(text)["choices"]} == {None}


async def test_feedback_on_one_choice_judges_that_one(agent: Any) -> None:
    choices = (await agent.client.post("/v1/chat/completions", json=CHAT)).json()["choices"]
    first, second, third = [choice["interaction_id"] for choice in choices]

    async def accepted(**body: Any) -> str:
        reply = await agent.client.post("/v1/feedback", json=body)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["feedback_id"])

    verdict = await accepted(inference_id=second, metric_name="reward", value=0.5)
    preference = await accepted(kind="preference", chosen=third, rejected=first)

    spec = agent.record.spec
    online = {**spec["online"], "off_policy": {"preference": {}}}
    supply = LiveSupply(agent.bus, agent.job, OnlineJob.parse({**spec, "online": online}), epoch=1)
    await supply.recover(LedgerState())
    judged = {
        turn.interaction.id: trajectory.reward
        for found in supply.matching.ready.values()
        for trajectory in found
        for turn in trajectory.turns
        if verdict in trajectory.feedback
    }
    assert judged == {second: 0.5}, "its siblings wait for their own feedback"
    places = {}
    for message in await agent.bus.read(subjects.INTERACTIONS, subjects.interactions(agent.job)):
        places[unpack(message.data, Interaction)[0].id] = message.seq
    assert supply.matching.examples.ready[preference].context == {third: places[third], first: places[first]}
