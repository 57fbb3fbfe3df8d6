"""Agents' answers from `/v1/chat/completions` and `/v1/completions`, and the records of them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from penstock.shared.config.jobs.kinds import parse_training

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, and check that it ends as it must."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_chat_is_answered_and_recorded(agent: Any) -> None:
    response = await agent.chat("hi", return_token_ids=True, user="ann", metadata={"task": "greet"})
    body = response.json()
    assert response.status_code == 200, body
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello world and more", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert (body["model"], body["system_fingerprint"]) == ("agent@0", "v0")
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}
    id = response.headers["x-interaction-id"]
    assert body["id"] == f"chatcmpl-{id}"
    assert response.headers["x-policy-version"] == "0"
    record = await agent.recorded(id)
    assert record.token_ids == choice["token_ids"]
    assert record.prompt_ids == body["prompt_token_ids"]
    assert len(record.logprobs) == 6
    assert all(-1e-3 < logprob <= 0 for logprob in record.logprobs)
    assert [(span.version, span.start, span.end) for span in record.spans] == [(0, 0, 6)]
    assert (record.user, record.untrainable, record.alone, record.text) == ("p-ann", "", True, "hello world and more")
    assert (record.prompt, record.tags) == ("hi", {"task": "greet"})
    assert f"ep_{record.episode}" == response.headers["x-episode-id"]
    shown = (await agent.client.get(f"/v1/interactions/{body['id']}")).json()
    assert (shown["id"], shown["token_ids"], shown["spans"]) == (id, record.token_ids, [[0, 0, 6]])
    unknown = await agent.client.get("/v1/interactions/chatcmpl-019300f4-0000-7000-8000-000000000000")
    assert unknown.status_code == 404


async def test_a_stream_sends_tokens_one_by_one(agent: Any) -> None:
    response = await agent.chat("hi", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = events(response)
    texts = [part["choices"][0]["delta"].get("content") for part in parts[:-1]]
    assert [text for text in texts if text] == ["hello", " wor", "ld", " and", " more"]
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 2) + ["stop"]
    assert parts[-1]["usage"]["completion_tokens"] == 6
    assert (await agent.recorded(response.headers["x-interaction-id"])).finish == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_not_part_of_the_text(agent: Any, stream: bool) -> None:
    response = await agent.chat("hi", stop=["world an"], stream=stream)
    if stream:
        text = "".join(part["choices"][0]["delta"].get("content") or "" for part in events(response))
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "hello "
    record = await agent.recorded(response.headers["x-interaction-id"])
    assert (len(record.token_ids), record.finish, record.text) == (4, "stop", "hello ")


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_parsed(agent: Any, stream: bool) -> None:
    response = await agent.chat("tool", tools=TOOLS, stream=stream)
    if stream:
        deltas = [part["choices"][0]["delta"] for part in events(response)]
        content = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0]
    else:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        content, calls = choice["message"]["content"], choice["message"]["tool_calls"]
    assert content == "I call"
    assert calls[0]["function"]["name"] == "add"
    assert orjson.loads(calls[0]["function"]["arguments"]) == {"a": 1, "b": 2}
    record = await agent.recorded(response.headers["x-interaction-id"])
    assert (record.finish, record.tool_calls_valid) == ("tool_calls", True)


async def test_a_broken_tool_call_stays_text_and_is_recorded_as_such(agent: Any) -> None:
    response = await agent.chat("bad", tools=TOOLS)
    assert response.json()["choices"][0]["message"]["content"] == "<tool_call>{broken</tool_call>"
    assert (await agent.recorded(response.headers["x-interaction-id"])).tool_calls_valid is False
    plain = await agent.chat("bad")
    assert (await agent.recorded(plain.headers["x-interaction-id"])).tool_calls_valid is None


async def test_choices_are_siblings_with_seeds_of_their_own(agent: Any) -> None:
    before = len(await agent.interactions())
    first = await agent.chat("?", n=3, seed=5, max_tokens=8, return_token_ids=True, ignore_eos=True)
    again = await agent.chat("?", n=3, seed=5, max_tokens=8, return_token_ids=True, ignore_eos=True)
    choices = first.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    assert [c["token_ids"] for c in again.json()["choices"]] == [c["token_ids"] for c in choices]
    records = (await agent.interactions())[before : before + 3]
    assert {record.request for record in records} == {first.headers["x-interaction-id"]}
    assert sorted(record.index for record in records) == [0, 1, 2]
    assert len({record.id for record in records}) == 3


async def test_logprobs_of_a_chat(agent: Any) -> None:
    response = await agent.chat("hi", logprobs=True, top_logprobs=2)
    rows = response.json()["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in rows] == ["hello", " wor", "ld", " and", " more", "<eos>"]
    assert all(row["top_logprobs"][0]["token"] == row["token"] and len(row["top_logprobs"]) == 2 for row in rows)
    assert rows[0]["bytes"] == list(b"hello")
    streamed = events(await agent.chat("hi", logprobs=True, stream=True))
    streamed_tokens = [row["token"] for part in streamed for row in part["choices"][0]["logprobs"]["content"]]
    assert streamed_tokens == [row["token"] for row in rows]


async def test_a_prompt_is_scored_by_echo(agent: Any) -> None:
    ids = [agent_id(word) for word in ("hi", "hello", " wor")]
    body = {"model": "agent", "prompt": [ids, ids[:2]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    response = await agent.client.post("/v1/completions", json=body)
    first, second = response.json()["choices"]
    assert (first["text"], second["text"]) == ("hihello world", "hihello wor")
    scores = first["logprobs"]
    assert scores["tokens"] == ["hi", "hello", " wor", "ld"]
    assert scores["token_logprobs"][0] is None
    assert all(-1e-3 < logprob <= 0 for logprob in scores["token_logprobs"][1:])
    assert scores["text_offset"] == [0, 2, 7, 11]
    assert scores["top_logprobs"][0] is None
    assert max(scores["top_logprobs"][1].values()) == scores["token_logprobs"][1]
    alone = await agent.client.post("/v1/completions", json={**body, "prompt": ids, "max_tokens": 0})
    assert alone.json()["choices"][0]["text"] == "hihello wor"
    assert len(alone.json()["choices"][0]["logprobs"]["tokens"]) == 3


async def test_a_text_prompt_streams(agent: Any) -> None:
    body = {"model": agent.job, "prompt": "hi", "stream": True, "max_tokens": 3}
    parts = events(await agent.client.post("/v1/completions", json=body))
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello world"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert parts[0]["id"].startswith("cmpl-")


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"temperature": 0}, "sampling_not_replayable"),
        ({"temperature": 0.5}, "sampling_not_replayable"),
        ({"top_p": 0.9}, "sampling_not_replayable"),
        ({"top_k": 5}, "sampling_not_replayable"),
        ({"min_tokens": 2}, "sampling_not_replayable"),
        ({"frequency_penalty": 0.5}, "sampling_not_replayable"),
        ({"presence_penalty": -0.5}, "sampling_not_replayable"),
        ({"logit_bias": {"1": 2}}, "sampling_not_replayable"),
        ({"metadata": {"train": False}}, "train_false"),
        ({"user": "no-thanks"}, "opted_out"),
        ({"headers": {"X-Turn-Type": "side"}}, "side_turn"),
        ({"temperature": 1, "top_p": 1, "seed": 4}, ""),
    ],
)
async def test_answers_that_cannot_be_trained_on_are_served_and_recorded_with_the_reason(
    agent: Any, sampling: dict[str, Any], reason: str
) -> None:
    response = await agent.chat("hi", **sampling)
    assert response.json()["choices"][0]["message"]["content"] == "hello world and more"
    assert (await agent.recorded(response.headers["x-interaction-id"])).untrainable == reason


async def test_a_changed_temperature_is_that_of_requests_that_name_none(agent: Any) -> None:
    async def amend(temperature: float) -> None:
        patch = {"sampling": {"temperature": temperature}}
        reply = await agent.client.patch(f"/v1/jobs/{agent.job}", json=patch, params={"wait": 0})
        assert reply.status_code == 202, reply.text
        agent.rollouts[0].amend(parse_training(reply.json()["spec"]))
        async with asyncio.timeout(30):
            while agent.gateway.find("agent").temperature != temperature:
                await asyncio.sleep(0.01)

    await amend(0.5)
    try:
        for named, sampled, reason in (({}, 0.5, ""), ({"temperature": 1}, 1.0, "sampling_not_replayable")):
            response = await agent.chat("hi", **named)
            record = await agent.recorded(response.headers["x-interaction-id"])
            assert (record.sampling.temperature, record.untrainable) == (sampled, reason)
    finally:
        await amend(1.0)


async def test_an_answer_with_store_false_is_not_recorded(agent: Any) -> None:
    before = len(await agent.interactions())
    response = await agent.chat("hi", store=False)
    assert response.status_code == 200
    assert response.headers["x-recorded"] == "false"
    assert len(await agent.interactions()) == before


def agent_id(word: str) -> int:
    """Return the id of a word of the chain."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "hi", "hello", " wor", "ld"]
    return words.index(word)
