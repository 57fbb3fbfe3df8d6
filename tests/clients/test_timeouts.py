"""OpenAI's SDK times out during an answer and retries by itself: it gets the same answer, which is recorded once."""

from __future__ import annotations

from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.clients


async def test_a_timeout_of_the_sdk_is_one_interaction(
    start_openai: Callable[[str, str], Awaitable[Process]], chain: ModuleType, tmp_path: Path
) -> None:
    async with chain.running_stack(tmp_path) as stack:
        process = await start_openai("openai_that_gives_up.py", stack.url)
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        (record,) = await stack.interactions()
    assert f"chatcmpl-{record.id}" == output.decode().split()[-1]
    assert (record.finish, record.untrainable) == ("length", "")
