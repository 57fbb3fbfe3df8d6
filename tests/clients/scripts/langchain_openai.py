"""LangChain's models for OpenAI's API. Run as ``langchain_openai.py URL KEY MODEL TOKENIZER``."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

URL, KEY, MODEL = sys.argv[1:4]
SAYS = "hello world and more"


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"{a + b}, and hi"


def main() -> None:
    """Run the client and print the number of answers."""
    chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=16, max_retries=0)
    answer = chat.invoke("hi")
    assert answer.content == SAYS
    assert answer.response_metadata["id"].startswith("chatcmpl-")
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 6
    assert "".join(str(part.content) for part in chat.stream("hi", stream_usage=True)) == SAYS
    assert [found.content for found in chat.batch(["hi"] * 4)] == [SAYS] * 4

    agent = chat.bind_tools([add])
    turns = [HumanMessage("tool")]
    called = agent.invoke(turns)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    result = add.invoke(call)
    assert isinstance(result, ToolMessage)
    assert agent.invoke([*turns, called, result]).content == SAYS

    text = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=16, max_retries=0)
    assert text.invoke("hi") == SAYS
    assert "".join(text.stream("hi")) == SAYS
    print(json.dumps({"version": version("langchain-openai"), "answers": 1 + 1 + 4 + 2 + 2}))


main()
