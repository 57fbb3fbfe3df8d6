"""OpenAI's own SDK: every call that agents use. Run as ``openai.py URL KEY MODEL TOKENIZER``."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

URL, KEY, MODEL = sys.argv[1:4]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
HI: Any = [{"role": "user", "content": "hi"}]
CALL: Any = [{"role": "user", "content": "tool"}]
SAYS = "hello world and more"


def chat(client: openai.OpenAI) -> int:
    """Ask for whole and streamed answers; return the number of answers."""
    assert MODEL in [model.id for model in client.models.list()], "beside final checkpoints that can be served"
    assert client.models.retrieve(MODEL).id == MODEL
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=16)
    answer = raw.parse()
    assert answer.choices[0].message.content == SAYS
    assert answer.model.startswith(f"{MODEL}@")
    assert answer.id == f"chatcmpl-{raw.headers['x-interaction-id']}"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == SAYS
    assert parts[-1].usage is not None
    scored = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, logprobs=True, top_logprobs=2)
    assert scored.choices[0].logprobs is not None
    assert len(scored.choices[0].logprobs.content or []) == 4
    extra = client.chat.completions.create(model=MODEL, messages=HI, extra_body={"return_token_ids": True})
    assert len((extra.choices[0].model_extra or {})["token_ids"]) == 6
    return 4


def tools(client: openai.OpenAI) -> int:
    """Get a tool call whole and streamed, then the answer to its result; return the number of answers."""
    called = client.chat.completions.create(model=MODEL, messages=CALL, tools=TOOLS).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    with client.chat.completions.stream(model=MODEL, messages=CALL, tools=TOOLS) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert (streamed.message.tool_calls or [])[0].function.arguments == call.function.arguments
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3, and hi"}
    turns = [*CALL, called.message, result]
    assert client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS).choices[0].message.content == SAYS
    return 3


def texts(client: openai.OpenAI) -> int:
    """Complete texts and token ids; return the number of answers."""
    text = client.completions.create(model=MODEL, prompt=[4], max_tokens=2, n=2, echo=True, logprobs=1)
    assert [choice.text for choice in text.choices] == ["hihello wor"] * 2
    assert len({(choice.model_extra or {})["interaction_id"] for choice in text.choices}) == 2
    both = client.completions.create(model=MODEL, prompt=["hi", "again"], max_tokens=3, stop=[" and"])
    assert [choice.text for choice in both.choices] == ["hello world", "lalala"]
    scores = client.completions.create(model=MODEL, prompt="hihello", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scores.logprobs is not None
    assert scores.logprobs.tokens == ["hi", "hello"]
    return 4


def refusals(client: openai.OpenAI) -> None:
    """Check that every refusal raises the SDK's own error, with a code."""
    stranger = client.with_options(api_key="unknown")
    for error, call in (
        (openai.AuthenticationError, stranger.models.list),
        (openai.NotFoundError, lambda: client.chat.completions.create(model="gpt", messages=HI)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=HI, max_tokens=9999)),
        (openai.UnprocessableEntityError, lambda: client.chat.completions.create(model=MODEL, messages=[])),
    ):
        try:
            call()
        except error as refused:
            assert refused.code, refused
        else:
            raise AssertionError(f"{error.__name__} was not raised")


def verdicts(client: openai.OpenAI) -> list[str]:
    """Post feedback on two answers by the SDK's own HTTP client; return the ids of the feedback."""
    posted = []
    for value in (True, False):
        answer = client.chat.completions.create(model=MODEL, messages=HI)
        body = {"inference_id": answer.id, "metric_name": "accepted", "value": value}
        found: Any = client.post("/feedback", body=body, cast_to=object)
        posted.append(found["feedback_id"])
    return posted


async def at_once() -> int:
    """Read thirty-two streams of the asynchronous client; return their number."""

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        assert set(await asyncio.gather(*(one(client) for _ in range(32)))) == {SAYS}
    return 32


def main() -> None:
    """Run the client; print the number of answers and the ids of the feedback."""
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        answers = chat(client) + tools(client) + texts(client)
        refusals(client)
        feedback = verdicts(client)
    answers += asyncio.run(at_once()) + len(feedback)
    print(json.dumps({"version": openai.__version__, "answers": answers, "feedback": feedback}))


main()
