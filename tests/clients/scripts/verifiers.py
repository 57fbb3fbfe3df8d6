"""Verifiers: agents of its stock harness, one with a prompt and one held open.

The harness is a program of its own (uv resolves what it needs), and its requests come through a server of verifiers.
Run as ``verifiers.py URL KEY MODEL TOKENIZER``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import version

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import NullHarnessConfig

URL, KEY, MODEL = sys.argv[1:4]
SAYS = "hello world and more"


async def main() -> None:
    """Run the client and print the number of answers."""
    os.environ["PENSTOCK_KEY"] = KEY
    os.environ["UV_CACHE_DIR"] = f"{sys.prefix}/uv-cache"  # the harness's packages are fetched once for an environment
    config = vf.AgentConfig(
        harness=NullHarnessConfig(id="null"),
        runtime=vf.SubprocessConfig(),
        model=MODEL,
        client=vf.EvalClientConfig(base_url=f"{URL}/v1", api_key_var="PENSTOCK_KEY"),
        max_turns=4,
    )
    async with vf.make_agent(config) as agent:
        trace = await agent.run(vf.Task(vf.TaskData(idx=0, prompt="hi")))
        assert trace.ok, trace.errors
        assert trace.assistant_messages[-1].content == SAYS
        async with agent.interaction(vf.Task(vf.TaskData(idx=1, prompt=None))) as talk:
            for _ in range(2):
                segment = await talk.turn("hi")
                assert segment.last_reply == SAYS
        assert talk.trace.ok, talk.trace.errors
    print(json.dumps({"version": version("verifiers"), "answers": 1 + 2}))


asyncio.run(main())
