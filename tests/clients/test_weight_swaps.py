"""New weights every 200 ms while OpenAI's SDK streams: no request fails, and records name the version of each token."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.clients


async def test_new_weights_every_200_ms_cause_no_error(
    start_openai: Callable[[str, str], Awaitable[Process]], chain: ModuleType, tmp_path: Path
) -> None:
    async with chain.running_stack(tmp_path) as stack:
        process = await start_openai("openai_under_load.py", stack.url)
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
