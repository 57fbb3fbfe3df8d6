"""The stock OpenAI SDK, unmodified, in an environment of its own (its interpreter: PENSTOCK_CLIENTS_PYTHON)."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, STDOUT
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("PENSTOCK_CLIENTS_PYTHON", "")
SCRIPT = Path(__file__).with_name("openai_client.py")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON, reason="PENSTOCK_CLIENTS_PYTHON names no interpreter with openai"),
]


async def started(url: str, task: str) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return await asyncio.create_subprocess_exec(
        PYTHON, SCRIPT, url, task, stdout=PIPE, stderr=STDOUT, env=environment
    )  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
async def test_every_call_that_agents_use(agent: Any) -> None:
    process = await started(agent.url, "talk")
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def test_new_weights_every_200_ms_are_no_error(stack_of: Any) -> None:
    async with stack_of() as stack:
        process = await started(stack.url, "load")
        ended = asyncio.create_task(process.communicate())
        version = 0
        while not ended.done():
            version += 1
            await stack.publish(version)
            await asyncio.wait([ended], timeout=0.2)
        output, _ = ended.result()
        assert process.returncode == 0, output.decode()
        records = await stack.interactions()
        assert len(records) == int(output.split()[-1]) > 0
        assert max(record.spans[-1].version for record in records) > 1
        for record in records:
            assert all(a.version < b.version and a.end == b.start for a, b in pairwise(record.spans))
            assert record.spans[-1].end == len(record.token_ids) == len(record.logprobs)
