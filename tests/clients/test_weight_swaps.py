"""New weights every 200 ms while OpenAI's SDK streams: no error, and each token knows the version that wrote it."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("openai_under_load.py")

pytestmark = pytest.mark.clients


async def test_new_weights_every_200_ms_are_no_error(
    python_of: Callable[[str], Path], client_environment: dict[str, str], chain: ModuleType, tmp_path: Path
) -> None:
    python = python_of("openai")
    async with chain.running_stack(tmp_path) as stack:
        process = await asyncio.create_subprocess_exec(
            python, "-I", SCRIPT, stack.url, "none", "agent", stdout=PIPE, stderr=STDOUT, env=client_environment
        )
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
