"""A canary version answers its share of the conversations; records name the answers that are not trained on."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.training.canary import is_in_canary
from penstock.shared.protocol.live.interaction import CANARY

SHARE = 0.5
TRIED = {"promotion": {"canary": {"share": SHARE}}}


async def have(stack: Any, version: int) -> None:
    """Wait until every worker holds ``version`` as its candidate."""
    async with asyncio.timeout(60):
        found = [session._candidate for session in stack.rollouts]
        while not all(one is not None and one.policy.version == version for one in found):
            await asyncio.sleep(0.01)
            found = [session._candidate for session in stack.rollouts]


async def on_trial(stack: Any, version: int | None, *gateways: Any) -> None:
    """Announce a canary version (None: none), as the leader does; wait until the gateways have received it."""
    row = None if version is None else {"version": version, "share": SHARE}
    await JobStore(stack.bus).set_status(stack.job, canary=row)
    expected = None if version is None else (version, SHARE)
    async with asyncio.timeout(60):
        while not all(gateway.find("agent").canary == expected for gateway in (stack.gateway, *gateways)):
            await asyncio.sleep(0.01)


@pytest.mark.long
async def test_each_conversation_is_answered_by_its_arm_at_every_coordinator(stack_of: Any) -> None:
    async with stack_of(consent="opt_in", **TRIED) as stack, stack.replica() as other:
        await stack.publish(1, away=True, candidate=True)
        await have(stack, 1)
        for user, reason in (("yes", ""), ("no", "opted_out"), ("silent", "no_consent"), ("", "no_consent")):
            reply = await stack.chat("hi", **({"user": user} if user else {}))
            assert (await stack.recorded(reply.headers["x-interaction-id"])).untrainable == reason
            assert reply.json()["choices"][0]["message"]["content"] == "hello world and more"

        await on_trial(stack, 1, other.gateway)
        tried = 0
        for n in range(12):
            expected = is_in_canary(stack.job, 1, SHARE, f"local talk-{n}")
            tried += expected
            for client in (stack.client, other.client):
                reply = await stack.chat("hi", client=client, user="yes", headers={"x-episode-id": f"talk-{n}"})
                record = await stack.recorded(reply.headers["x-interaction-id"])
                assert record.key_id == "local"
                assert record.untrainable == (CANARY if expected else "")
                assert reply.headers["x-policy-version"] == str(int(expected))
                assert [span.version for span in record.spans] == [int(expected)]
                assert reply.json()["choices"][0]["message"]["content"] == ("" if expected else "hello world and more")
        assert 0 < tried < 12

        await on_trial(stack, 7)  # no worker has it
        names = [n for n in range(12) if is_in_canary(stack.job, 7, SHARE, f"local talk-{n}")]
        reply = await stack.chat("hi", user="yes", headers={"x-episode-id": f"talk-{names[0]}"})
        record = await stack.recorded(reply.headers["x-interaction-id"])
        assert (record.untrainable, record.spans[0].version) == (CANARY, 0)
        await on_trial(stack, None)
        reply = await stack.chat("hi", user="yes", headers={"x-episode-id": f"talk-{names[0]}"})
        assert (await stack.recorded(reply.headers["x-interaction-id"])).untrainable == ""


async def test_no_agent_gets_a_token_of_the_next_version_on_trial(stack_of: Any) -> None:
    """When the engine of the canary moves to the next version, the served version continues its conversations."""
    async with stack_of(**TRIED) as stack:
        await stack.publish(1, candidate=True)
        await have(stack, 1)
        await on_trial(stack, 1)
        episode = next(f"talk-{n}" for n in range(99) if is_in_canary(stack.job, 1, SHARE, f"local talk-{n}"))
        messages = [{"role": "user", "content": "again"}]
        body = {"model": "agent", "messages": messages, "stream": True, "max_tokens": 1900}
        path, headers = "/v1/chat/completions", {"x-episode-id": episode}
        response = await stack.client.send(
            stack.client.build_request("POST", path, json=body, headers=headers), stream=True
        )
        lines = response.aiter_lines()
        await anext(lines)
        assert response.headers["x-policy-version"] == "1"
        await stack.publish(2, away=True, candidate=True)
        await have(stack, 2)
        async with asyncio.timeout(60):
            while not stack.rollouts[0].status()["running"]:  # the engine that serves goes on
                await asyncio.sleep(0.01)
        await stack.publish(3, away=True)
        ends = [orjson.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        assert ends[-1]["choices"][0]["finish_reason"] == "stop"
        (record,) = await stack.interactions()
        versions = [span.version for span in record.spans]
        assert (versions[0], versions[-1], set(versions) <= {1, 0, 3}) == (1, 3, True)
        assert record.untrainable == CANARY
