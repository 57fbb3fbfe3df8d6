"""LiteLLM, as OpenAI's API and as a hosted vLLM. Run as ``litellm.py URL KEY MODEL TOKENIZER``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices when it is imported

import litellm

URL, KEY, MODEL = sys.argv[1:4]
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SAYS = "hello world and more"
WHERE: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 16, "num_retries": 0}


def chat(provider: str) -> int:
    """Ask for whole and streamed answers and a tool call; return the number of answers."""
    model = f"{provider}/{MODEL}"
    answer = litellm.completion(model=model, messages=HI, **WHERE)
    assert answer.choices[0].message.content == SAYS
    assert answer.id.startswith("chatcmpl-")
    assert answer._hidden_params["additional_headers"]["llm_provider-x-policy-version"].isdecimal()
    parts = list(litellm.completion(model=model, messages=HI, stream=True, **WHERE))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == SAYS
    asked = [{"role": "user", "content": "tool"}]
    called = litellm.completion(model=model, messages=asked, tools=TOOLS, **WHERE).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    result = {"role": "tool", "tool_call_id": call.id, "content": "3, and hi"}
    turns = [*asked, called.message.model_dump(), result]
    assert litellm.completion(model=model, messages=turns, tools=TOOLS, **WHERE).choices[0].message.content == SAYS
    return 4


def refusals() -> None:
    """Check that refusals raise LiteLLM's own errors."""
    for error, changes in (
        (litellm.AuthenticationError, {"api_key": "unknown"}),
        (litellm.NotFoundError, {"model": "openai/gpt"}),
        (litellm.BadRequestError, {"max_tokens": 9999}),
    ):
        try:
            litellm.completion(**{"model": f"openai/{MODEL}", "messages": HI, **WHERE, **changes})
        except error:
            continue
        raise AssertionError(f"{error.__name__} was not raised")


async def at_once() -> int:
    """Send eight asynchronous requests; return the number of answers."""
    asked = (litellm.acompletion(model=f"openai/{MODEL}", messages=HI, **WHERE) for _ in range(8))
    assert {answer.choices[0].message.content for answer in await asyncio.gather(*asked)} == {SAYS}
    return 8


def main() -> None:
    """Run the client and print the number of answers."""
    answers = chat("openai") + chat("hosted_vllm")
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="hi", **WHERE)
    assert text.choices[0].text == SAYS
    refusals()
    answers += 1 + asyncio.run(at_once())
    print(json.dumps({"version": version("litellm"), "answers": answers}))


main()
