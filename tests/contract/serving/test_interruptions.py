"""New weights, lost workers and retries: agents notice none of them, and the records are right."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest
from msgspec.structs import replace

from penstock.services.coordinator.serving import retries
from penstock.services.rollout.serving import server
from penstock.services.rollout.serving.recorder import Recorder

IDS = {"return_token_ids": True}
LONG = 1900
"""More tokens than are sampled before a test publishes weights that end every answer."""


async def opened(stack: Any, **more: Any) -> tuple[httpx.Response, Any]:
    """Open a stream and read its first event; return the response and its further lines."""
    body = {"model": "agent", "messages": [{"role": "user", "content": "again"}], "stream": True, **IDS, **more}
    request = stack.client.build_request("POST", "/v1/chat/completions", json=body)
    response = await stack.client.send(request, stream=True)
    assert response.status_code == 200
    lines = response.aiter_lines()
    await anext(lines)
    return response, lines


async def tokens_of(lines: Any) -> tuple[list[int], list[str]]:
    """Read the rest of a stream after its first event; return its token ids and finish reasons."""
    tokens, ends, last = [], [], ""
    async for line in lines:
        if line.startswith("data: {"):
            event = orjson.loads(line[6:])
            assert "error" not in event, event
            choice = event["choices"][0]
            tokens += choice["token_ids"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        last = line or last
    assert last == "data: [DONE]"
    return tokens, ends


async def settled(stack: Any, number: int) -> Any:
    """Wait until there are ``number`` records; return them."""
    async with asyncio.timeout(60):
        while len(found := await stack.interactions()) < number:
            await asyncio.sleep(0.02)
    return found


async def test_new_weights_are_invisible_and_every_token_knows_its_version(stack_of: Any) -> None:
    async with stack_of() as stack:
        response, lines = await opened(stack, max_tokens=LONG)
        for version in (1, 2):
            await stack.publish(version, away=version == 2)
            await stack.serving(version)
        tokens, ends = await tokens_of(lines)
        record = (await settled(stack, 1))[0]
        assert ends == ["stop"]
        assert record.token_ids[1:] == tokens
        assert len(record.token_ids) == len(record.logprobs)
        assert [span.version for span in record.spans] == [0, 1, 2]
        assert [span.start for span in record.spans[1:]] == [span.end for span in record.spans[:-1]]
        assert record.untrainable == ""
        assert response.headers["x-policy-version"] == "0"


async def test_another_worker_goes_on_where_one_was_lost(stack_of: Any) -> None:
    async with stack_of() as stack:
        streams = [await opened(stack, max_tokens=LONG) for _ in range(3)]
        waiting = asyncio.create_task(stack.chat("again", max_tokens=LONG, **IDS))
        stack.add_worker("rollout-1")
        await stack.serving(0)
        stack.sessions[0].cancel()
        del stack.rollouts[0]
        async with asyncio.timeout(60):
            while stack.rollouts[0].status()["requests"] < 4:
                await asyncio.sleep(0.01)
        await stack.publish(1, away=True)
        received = []
        for _, lines in streams:
            tokens, ends = await tokens_of(lines)
            assert ends == ["stop"]
            received.append(tokens)
        received.append((await waiting).json()["choices"][0]["token_ids"][1:])
        records = await settled(stack, 4)
        assert sorted(record.token_ids[1:] for record in records) == sorted(received)
        assert {record.spans[-1].version for record in records} == {1}


async def test_a_restart_of_the_bus_loses_no_token(stack_of: Any) -> None:
    async with stack_of() as stack:
        streams = [await opened(stack, max_tokens=LONG) for _ in range(2)]
        await asyncio.to_thread(stack.server.restart)
        await stack.bus.wait_connected(30)
        await stack.publish(1, away=True)
        received = []
        for _, lines in streams:
            tokens, ends = await tokens_of(lines)
            assert ends == ["stop"]
            received.append(tokens)
        records = await settled(stack, 2)
        assert sorted(record.token_ids[1:] for record in records) == sorted(received)


@pytest.mark.long
async def test_a_draining_worker_finishes_its_requests(stack_of: Any) -> None:
    async with stack_of(hold_s=0.5) as stack:
        _, lines = await opened(stack, max_tokens=400)
        stack.rollouts[0].drain()
        refused = await stack.chat("hi")
        assert refused.status_code == 503
        tokens, ends = await tokens_of(lines)
        assert (len(tokens), ends) == (399, ["length"])
        await asyncio.wait_for(asyncio.shield(stack.sessions[0]), 60)


async def test_without_a_worker_the_client_is_asked_to_retry(stack_of: Any) -> None:
    async with stack_of(hold_s=0.5) as stack:
        stack.sessions[0].cancel()
        await asyncio.gather(*stack.sessions, return_exceptions=True)
        response = await stack.chat("hi")
        assert response.status_code == 503
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("1", "1000")
        assert response.json()["error"]["code"] == "no_worker"


async def test_a_client_that_leaves_is_recorded_as_such(stack_of: Any) -> None:
    async with stack_of() as stack:
        response, _ = await opened(stack, max_tokens=LONG)
        await response.aclose()
        record = (await settled(stack, 1))[0]
        assert (record.finish, record.untrainable) == ("client_disconnected", "client_disconnected")
        assert 0 < len(record.token_ids) < LONG
        assert len(record.token_ids) == len(record.logprobs) == record.spans[-1].end


async def test_answers_that_a_dead_gateway_requested_are_not_trained_on(
    stack_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_SILENT", 2)
    async with stack_of() as stack:
        for _ in range(2):
            await opened(stack, max_tokens=LONG)
        await stack.rollouts[0]._engine.pause("keep")  # or a fast engine would be done before the silence is noticed
        stack.gateway_task.cancel()  # as if it died: it sends and receives nothing
        records = await settled(stack, 2)
        for record in records:
            assert (record.finish, record.untrainable) == ("client_disconnected", "client_disconnected")
            assert 0 < len(record.token_ids) < LONG
        async with asyncio.timeout(60):
            while stack.rollouts[0].status()["requests"]:
                await asyncio.sleep(0.01)


@pytest.mark.long
async def test_a_gateway_that_was_only_stalled_gets_its_answer(stack_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_SILENT", 2)
    async with stack_of() as stack, asyncio.timeout(60):
        _, lines = await opened(stack, max_tokens=LONG)
        engine = stack.rollouts[0]._engine
        await engine.pause("keep")  # or a fast engine would be done before its worker misses the gateway
        notify = stack.gateway._bus.notify

        async def muted(subject: str, data: bytes) -> None:
            if not subject.startswith("inference.present."):
                await notify(subject, data)

        stack.gateway._bus.notify = muted
        cut = (await settled(stack, 1))[0]
        stack.gateway._bus.notify = notify
        assert (cut.finish, cut.untrainable) == ("client_disconnected", "client_disconnected")
        await engine.resume()
        await stack.publish(1, away=True)
        tokens, ends = await tokens_of(lines)
        assert ends == ["stop"]
        whole = (await settled(stack, 2))[1]
        assert (whole.id, whole.finish, whole.untrainable) == (cut.id, "stop", "")
        assert whole.token_ids[1:] == tokens
        done = await stack.recorded((await stack.chat("hi")).headers["x-interaction-id"])
        assert await Recorder(stack.bus, stack.job).record_cut(replace(done, finish="client_disconnected"))
        assert await stack.recorded(done.id) == done


@pytest.mark.long
async def test_a_stop_string_may_begin_at_a_worker_that_was_lost(stack_of: Any) -> None:
    async with stack_of() as stack:
        stop = ["la" * 600]
        _, lines = await opened(stack, max_tokens=LONG, stop=stop)
        stack.add_worker("rollout-1")
        await stack.serving(0)
        stack.sessions[0].cancel()
        del stack.rollouts[0]
        tokens, ends = await tokens_of(lines)
        record = (await settled(stack, 1))[0]
        assert ends == ["stop"]
        assert len(tokens) + 1 == len(record.token_ids) == 600
        assert record.text == ""


async def test_a_retry_of_a_stock_client_is_one_interaction(stack_of: Any) -> None:
    async with stack_of() as stack:
        body = {"max_tokens": 100, **IDS}
        task = asyncio.create_task(stack.chat("again", headers={"x-stainless-retry-count": "0"}, **body))
        async with asyncio.timeout(30):
            while not stack.rollouts[0].status()["requests"]:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        again = await stack.chat("again", headers={"x-stainless-retry-count": "1"}, **body)
        once_more = await stack.chat("again", headers={"x-stainless-retry-count": "2"}, **body)
        other = await stack.chat("hi", headers={"x-stainless-retry-count": "1"})
        assert again.json()["usage"]["completion_tokens"] == 100
        assert once_more.json()["id"] != again.json()["id"]
        assert other.json()["id"] != again.json()["id"]
        records = await stack.interactions()
        assert sorted(len(record.token_ids) for record in records) == [6, 100, 100]
        assert again.headers["x-interaction-id"] in {record.id for record in records}


@pytest.mark.long
async def test_a_retry_does_not_get_the_answer_of_another_client_with_the_same_body(stack_of: Any) -> None:
    async with stack_of() as stack:
        body = {
            "model": "agent",
            "messages": [{"role": "user", "content": "again"}],
            "max_tokens": LONG,
            "stream": True,
        }

        async def sent(retries: int) -> httpx.Response:
            headers = {"x-stainless-retry-count": str(retries)}
            request = stack.client.build_request("POST", "/v1/chat/completions", json=body, headers=headers)
            return await stack.client.send(request, stream=True)

        other, retry = await sent(0), await sent(1)
        assert retry.headers["x-interaction-id"] != other.headers["x-interaction-id"]
        for one in (retry, other):
            await anext(one.aiter_lines())  # what no worker has begun leaves no record
            await one.aclose()
        await settled(stack, 2)


async def test_an_abandoned_request_goes_to_no_other_worker(stack_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "COME_BACK_S", 1.0)
    async with stack_of() as stack, asyncio.timeout(60):
        first = {"x-stainless-retry-count": "0"}
        task = asyncio.create_task(stack.chat("again", headers=first, max_tokens=LONG))
        while not stack.rollouts[0].status()["requests"]:
            await asyncio.sleep(0.005)
        task.cancel()
        while not stack.gateway.retries.kept:
            await asyncio.sleep(0.005)
        stack.sessions[0].cancel()
        while stack.gateway.retries.kept:
            await asyncio.sleep(0.005)
        stack.add_worker("rollout-1")
        del stack.rollouts[0]
        await stack.serving(0)
        assert (await stack.chat("hi")).status_code == 200
        assert stack.rollouts[0].status()["requests"] == 0
        assert all(len(record.token_ids) < 10 or record.untrainable for record in await stack.interactions())
