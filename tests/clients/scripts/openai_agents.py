"""OpenAI's Agents SDK: a loop of two turns with a tool. Run as ``openai_agents.py URL KEY MODEL TOKENIZER``."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL, KEY, MODEL = sys.argv[1:4]
SAYS = "hello world and more"
added: list[tuple[int, int]] = []


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    added.append((a, b))
    return f"{a + b}, and hi"


async def main() -> None:
    """Run the client and print the number of answers."""
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        agent = Agent(
            name="adder",
            instructions="Add with the tool.",
            model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
            model_settings=ModelSettings(max_tokens=16),
            tools=[add],
        )
        whole = await Runner.run(agent, "tool", max_turns=3)
        assert whole.final_output == SAYS
        assert len(whole.raw_responses) == 2
        assert added == [(1, 2)]
        streamed = Runner.run_streamed(agent, "tool", max_turns=3)
        names = [event.item.type async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
        assert streamed.final_output == SAYS
        assert added == [(1, 2)] * 2
        assert [name for name in names if name.startswith("tool")] == ["tool_call_item", "tool_call_output_item"]
        further = await Runner.run(agent, [*whole.to_input_list(), {"role": "user", "content": "hi"}])
        assert further.final_output == SAYS
    print(json.dumps({"version": version("openai-agents"), "answers": 2 + 2 + 1}))


asyncio.run(main())
