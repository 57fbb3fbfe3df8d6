"""`response_format` and forced tool calls: the model is random, and every answer that ends has the form asked for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema_rs
import pytest

pytest.importorskip("llguidance", reason="penstock[structured] is not installed")
pytestmark = pytest.mark.asyncio(loop_scope="module")

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": POINT}}
STOP = {"type": "function", "function": {"name": "stop"}}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def lines_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_every_choice_is_valid_and_recorded_as_constrained(writer: Any) -> None:
    body = {"n": 4, "max_tokens": 200, "seed": 5, "logprobs": True, "top_logprobs": 2}
    response = await writer.chat("hi", response_format=schema_of(POINT), **body)
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validate(POINT, json.loads(choice["message"]["content"]))
        record = await writer.recorded(choice["interaction_id"])
        assert (record.constraint, record.untrainable) == ("response_format", "constrained")
        assert len(choice["logprobs"]["content"]) == len(record.token_ids) == len(record.logprobs)
        assert any(value < -0.5 for value in record.logprobs), "those of the mask would be 0 where nothing else may be"
    again = await writer.chat("hi", response_format=schema_of(POINT), **body)
    texts = [[choice["message"]["content"] for choice in one.json()["choices"]] for one in (response, again)]
    assert texts[0] == texts[1], "the seed determines the sample"
    shown = (await writer.client.get(f"/v1/interactions/{response.json()['choices'][0]['interaction_id']}")).json()
    assert shown["constraint"] == "response_format"


async def test_any_object(writer: Any) -> None:
    response = await writer.chat("hi", response_format={"type": "json_object"}, n=6, max_tokens=300)
    ended = [one["message"]["content"] for one in response.json()["choices"] if one["finish_reason"] == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert all(one["message"]["content"].startswith("{") for one in response.json()["choices"])


async def test_a_text_is_an_answer_like_another(writer: Any) -> None:
    response = await writer.chat("hi", response_format={"type": "text"}, tool_choice="auto", tools=[ADD])
    record = await writer.recorded(response.headers["x-interaction-id"])
    assert (record.constraint, record.untrainable) == ("", "")


async def test_a_stream_and_a_text_completion(writer: Any) -> None:
    body = {"model": "agent", "prompt": ["a", "b"], "max_tokens": 200, "response_format": schema_of(POINT)}
    response = await writer.client.post("/v1/completions", json={**body, "stream": True})
    texts = {0: "", 1: ""}
    parts = lines_of(response.text)
    for choice in (choice for part in parts for choice in part["choices"]):
        texts[choice["index"]] += choice["text"]
    for text in texts.values():
        jsonschema_rs.validate(POINT, json.loads(text))
    assert len(parts) > 4


async def test_a_stop_string_and_a_length_end_it_early(writer: Any) -> None:
    stopped = await writer.chat("hi", response_format=schema_of(POINT), stop=["x"], max_tokens=100)
    choice = stopped.json()["choices"][0]
    assert (choice["finish_reason"], "x" in choice["message"]["content"]) == ("stop", False)
    cut = await writer.chat("hi", response_format=schema_of(POINT), max_tokens=3)
    assert cut.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"tool_choice": "required"}, {"add", "stop"}),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, {"add"}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False, "response_format": schema_of(POINT)},
            {"add", "stop"},
        ),
    ],
    ids=["required", "named", "one"],
)
async def test_forced_calls(writer: Any, more: dict[str, Any], names: set[str], stream: bool) -> None:
    found: set[str] = set()
    for seed in range(20):
        if found == names:
            break
        response = await writer.chat("hi", tools=[ADD, STOP], max_tokens=200, seed=seed, stream=stream, **more)
        assert response.status_code == 200, response.text
        if stream:
            choices = [choice for part in lines_of(response.text) for choice in part["choices"]]
            calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or []]
            finish = choices[-1]["finish_reason"]
        else:
            calls = response.json()["choices"][0]["message"].get("tool_calls") or []
            finish = response.json()["choices"][0]["finish_reason"]
        record = await writer.recorded(response.headers["x-interaction-id"])
        assert (record.constraint, record.untrainable) == ("tool_choice", "constrained")
        if not calls:
            assert finish == "length"
            continue
        assert finish == "tool_calls"
        found |= {call["function"]["name"] for call in calls}
        for call in calls:
            if call["function"]["name"] == "add":
                jsonschema_rs.validate(POINT, json.loads(call["function"]["arguments"]))
        if more["tool_choice"] != "required" or "parallel_tool_calls" in more:
            assert len(calls) == 1
    assert found == names


@pytest.mark.long
async def test_another_worker_goes_on_in_the_same_form(writer_of: Any) -> None:
    long = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 100, "maxItems": 100}
    async with writer_of(hold_s=30.0) as stack:
        body = {
            "model": "agent", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "stream": True,
            "response_format": schema_of(long),
        }  # fmt: skip
        request = stack.client.build_request("POST", "/v1/chat/completions", json=body)
        response = await stack.client.send(request, stream=True)
        lines = response.aiter_lines()
        parts = [await anext(lines) for _ in range(12)]
        stack.add_worker("rollout-1")
        await stack.serving(0)
        stack.sessions[0].cancel()
        await asyncio.wait([stack.sessions[0]])
        async with asyncio.timeout(60):
            parts += [line async for line in lines]
        found = [choice for part in lines_of("\n".join(parts)) for choice in part["choices"]]
        jsonschema_rs.validate(long, json.loads("".join(one["delta"].get("content") or "" for one in found)))
        assert found[-1]["finish_reason"] == "stop"
        assert stack.rollouts[1].status()["requests"] == 0


@pytest.mark.parametrize(
    ("more", "code", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "invalid_schema", "/response_format"),
        ({"response_format": schema_of(True)}, "invalid_schema", "/response_format"),
        ({"response_format": schema_of({"type": "strin"})}, "invalid_schema", "/response_format"),
        ({"response_format": schema_of({"type": "array", "uniqueItems": True})}, "invalid_schema", "/response_format"),
        ({"response_format": schema_of({"pattern": "("})}, "invalid_schema", "/response_format"),
        ({"response_format": schema_of({"enum": ["x" * 70_000]})}, "invalid_schema", "/response_format"),
        ({"response_format": {"type": "grammar"}}, "unsupported_parameter", "/response_format"),
        ({"response_format": schema_of(POINT), "min_tokens": 4}, "unsupported_parameter", "/min_tokens"),
        ({"response_format": schema_of(POINT), "ignore_eos": True}, "unsupported_parameter", "/ignore_eos"),
        ({"tool_choice": "required"}, "invalid_schema", "/tool_choice"),
        ({"tool_choice": "sometimes", "tools": [ADD]}, "unsupported_parameter", "/tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]},
            "invalid_schema",
            "/tool_choice",
        ),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": 'a"'}}]},
            "invalid_schema",
            "/tool_choice",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/no"}}}],
            },
            "invalid_schema",
            "/tool_choice",
        ),
    ],
    ids=lambda value: str(value)[:48],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_forms(writer: Any, more: dict[str, Any], code: str, param: str, stream: bool) -> None:
    before = len(await writer.interactions())
    response = await writer.chat("hi", stream=stream, **more)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param), response.text
    assert error["type"] == "invalid_request_error"
    assert len(await writer.interactions()) == before


async def test_the_stock_client(writer: Any) -> None:
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int
        on: bool

    async with openai.AsyncOpenAI(base_url=f"{writer.url}/v1", api_key="any", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        parsed = await client.chat.completions.parse(
            model="agent", messages=messages, response_format=Point, max_tokens=400, seed=2
        )
        assert isinstance(parsed.choices[0].message.parsed, Point)
        called = await client.chat.completions.create(
            model="agent", messages=messages, tools=[ADD], tool_choice="required", max_tokens=400, seed=2
        )
        assert called.choices[0].message.tool_calls[0].function.name == "add"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="agent", messages=messages, response_format=schema_of({"type": "strin"})
            )
        assert refused.value.param == "/response_format"
