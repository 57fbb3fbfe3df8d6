"""OpenAI's SDK times out in the middle of an answer and asks again by itself: it gets that answer, recorded once."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("openai_that_gives_up.py")

pytestmark = pytest.mark.clients


async def test_a_timeout_of_the_sdk_is_one_interaction(
    python_of: Callable[[str], Path], client_environment: dict[str, str], chain: ModuleType, tmp_path: Path
) -> None:
    python = python_of("openai")
    async with chain.running_stack(tmp_path) as stack:
        process = await asyncio.create_subprocess_exec(
            python, "-I", SCRIPT, stack.url, "none", "agent", stdout=PIPE, stderr=STDOUT, env=client_environment
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        (record,) = await stack.interactions()
    assert f"chatcmpl-{record.id}" == output.decode().split()[-1]
    assert (record.finish, record.untrainable) == ("length", "")
