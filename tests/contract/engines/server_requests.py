"""Requests to an engine that is an HTTP server, and the end of its process; runs for each such engine.

See ``test_engine_vllm.py`` and ``test_engine_sglang.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import Token
from tests.processes import is_alive


async def completion(bench: Any, name: str, **sampling: Any) -> Any:
    request = bench.ask(name, **{"max_new_tokens": 30, **sampling})
    return (await bench.engine.generate(request)).samples[0]


async def test_the_end_of_one_completion_ends_no_other(bench: Any) -> None:
    """SGLang ends every request whose rid begins with the given rid, so 1 must not be a prefix of 10.

    The two that are aborted have four times as many tokens as the others, so that a server that is faster than this
    process has not completed them by then.
    """
    lengths = [2 * bench.length] * 2 + [bench.length // 2] * (bench.max_running - 2)
    tasks = [
        asyncio.create_task(bench.engine.generate(bench.ask(f"r{i}", max_new_tokens=length)))
        for i, length in enumerate(lengths)
    ]
    await bench.until_tokens(5 * bench.max_running)
    assert await bench.engine.abort(["r0", "r1"]) == 2
    ends = [(await task).samples[0].finish for task in tasks]
    assert ends == ["abort"] * 2 + ["length"] * (bench.max_running - 2)


async def test_a_retracted_completion_ends_with_its_tokens(bench: Any) -> None:
    """When a retracted completion is ended, the server repeats its last token; the engine must not count it."""
    task = asyncio.create_task(bench.engine.generate(bench.ask("held")))
    await bench.until_tokens(20)
    await bench.engine.pause("keep")
    known = bench.engine.generated_tokens
    assert await bench.engine.abort(["held"]) == 1
    sample = (await task).samples[0]
    assert sample.finish == "abort"
    assert bench.engine.generated_tokens == known
    assert bench.error(sample) < 1e-4
    await bench.engine.resume()


async def test_a_request_that_the_server_refuses_fails_alone(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = asyncio.create_task(completion(bench, "other", max_new_tokens=100))
    await bench.until_tokens(5)
    with monkeypatch.context() as patch:
        strange = {"input_ids": [5], "token_ids": [5], "sampling_params": {"max_tokens": "three"}}
        patch.setattr(bench.engine, "_body", lambda stream: {"rid": stream.rid, **strange})
        with pytest.raises(ConfigError, match="refuses a request"):
            await completion(bench, "strange")
    assert (await other).finish == "length"


async def test_likely_tokens_come_with_the_sampled_one(bench: Any) -> None:
    received: list[Token] = []
    request = bench.ask("top", max_new_tokens=8)
    request = type(request)(request_id="top", prompt_ids=request.prompt_ids, sampling=request.sampling, top_logprobs=2)
    sample = (await bench.engine.generate(request, received.append)).samples[0]
    plain = bench.plain([*bench.prompt, *sample.token_ids])[len(bench.prompt) - 1 : -1]
    assert [row[0][0] for row in sample.top] == plain.argmax(-1).tolist()
    assert [token.top for token in received] == sample.top[:-1]


async def test_a_server_that_dies_makes_the_engine_unavailable(bench: Any, settings: Any) -> None:
    """This test must run last, because it ends the server of the run."""
    asking = asyncio.create_task(bench.engine.generate(bench.ask("lost")))
    await bench.until_tokens(5)
    server = psutil.Process(bench.engine._server._process.pid)
    family = [server, *server.children(recursive=True)]
    os.kill(server.pid, signal.SIGKILL)
    await bench.until_unavailable(asking)
    await bench.engine.close()
    async with asyncio.timeout(60):
        while any(is_alive(process) for process in family):
            await asyncio.sleep(0.05)
    assert [path for path in settings.shm_dir.iterdir() if path.is_dir()] == [], "files of versions"
