"""What a user of the stock OpenAI SDK does; run by another interpreter: ``openai_client.py URL talk|load``."""

from __future__ import annotations

import concurrent.futures
import json
import sys
import time
from typing import Any

import openai

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
HI: Any = [{"role": "user", "content": "hi"}]


def talk(client: openai.OpenAI) -> None:
    """Every call that agents use."""
    assert [model.id for model in client.models.list()] == ["agent"]
    assert client.models.retrieve("agent").id == "agent"
    raw = client.chat.completions.with_raw_response.create(model="agent", messages=HI, max_tokens=16)
    answer = raw.parse()
    assert answer.choices[0].message.content == "hello world and more"
    assert answer.id == f"chatcmpl-{raw.headers['x-interaction-id']}"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    stream = client.chat.completions.create(
        model="agent", messages=HI, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "hello world and more"
    assert parts[-1].usage is not None
    called = client.chat.completions.create(
        model="agent", messages=[{"role": "user", "content": "tool"}], tools=TOOLS, max_tokens=16
    )
    call = (called.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    scored = client.chat.completions.create(model="agent", messages=HI, max_tokens=4, logprobs=True, top_logprobs=2)
    assert scored.choices[0].logprobs is not None
    assert len(scored.choices[0].logprobs.content or []) == 4
    text = client.completions.create(model="agent", prompt=[4], max_tokens=2, n=2, echo=True, logprobs=1)
    assert [choice.text for choice in text.choices] == ["hihello wor"] * 2
    extra = client.chat.completions.create(model="agent", messages=HI, extra_body={"return_token_ids": True})
    assert len((extra.choices[0].model_extra or {})["token_ids"]) == 6
    for error, call_it in (
        (openai.NotFoundError, lambda: client.chat.completions.create(model="gpt", messages=HI)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model="agent", messages=HI, max_tokens=9999)),
        (openai.UnprocessableEntityError, lambda: client.chat.completions.create(model="agent", messages=[])),
    ):
        try:
            call_it()
        except error as refused:
            assert refused.code, refused
        else:
            raise AssertionError(f"{error.__name__} was not raised")


def load(client: openai.OpenAI) -> None:
    """Streams one after another on four threads for three seconds; any error ends it."""

    def speak(until: float) -> int:
        number = 0
        while time.monotonic() < until:
            stream = client.chat.completions.create(
                model="agent", messages=[{"role": "user", "content": "again"}], max_tokens=60, stream=True
            )
            assert [part.choices[0].finish_reason for part in stream][-1] == "length"
            number += 1
        return number

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        print(sum(threads.map(speak, [time.monotonic() + 3] * 4)))


if __name__ == "__main__":
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0) as made:
        {"talk": talk, "load": load}[sys.argv[2]](made)
