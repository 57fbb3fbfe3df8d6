"""The limit of live requests per end user of a key."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_two_users_of_one_key(agent: Any) -> None:
    async with agent.replica(user_rate_limit="2/hour") as front:

        async def chat(user: str, **more: Any) -> Any:
            return await agent.chat("hi", client=front.client, user=user, **more)

        text = {"model": "agent", "prompt": "hi", "user": "ann"}
        assert (await chat("ann")).status_code == 200
        assert (await front.client.post("/v1/completions", json=text)).status_code == 200
        refused = [
            await chat("ann"),
            await chat("ann", stream=True),
            await chat("ann", path="/e/some-episode/v1/chat/completions"),
            await front.client.post("/v1/completions", json=text),
        ]
        for reply in refused:
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["type"]) == (429, "user_rate_limited", "rate_limit_error")
            wait_s = int(reply.headers["retry-after"])
            assert 1 <= wait_s <= 3600
            assert reply.headers["retry-after-ms"] == str(1000 * wait_s)
            assert reply.headers["ratelimit-policy"] == '"user";q=2;w=3600'
        reply = await chat("ben")
        assert reply.status_code == 200
        assert reply.headers["ratelimit-policy"].startswith('"requests";')
        for _ in range(3):
            assert (await agent.chat("hi", client=front.client)).status_code == 200, "it names no user"


async def test_refused_requests_are_not_counted(agent: Any) -> None:
    async with agent.replica(user_rate_limit="1/hour") as front:
        for more in ({"model": "gpt-4"}, {"max_tokens": "10"}):
            reply = await agent.chat("hi", client=front.client, user="ann", **more)
            assert reply.status_code in (404, 422)
        assert (await agent.chat("hi", client=front.client, user="ann")).status_code == 200
