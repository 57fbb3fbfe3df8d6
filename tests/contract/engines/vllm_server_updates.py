"""Updates of vLLM's HTTP server: the requests that the adapter sends, and failures of the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from penstock.shared.errors import Conflict, PenstockError, Unavailable, WeightsError
from penstock.shared.protocol.generation import WeightInfo
from tests.processes import is_alive

JOB = "job_engines"
IN_FLIGHT = 'vllm:rl_weight_update_operations_in_flight{operation="update"} 1.0'
Post = Callable[..., Awaitable[dict[str, Any]]]


async def completion(bench: Any, name: str, **sampling: Any) -> Any:
    request = bench.ask(name, **{"max_new_tokens": 30, **sampling})
    return (await bench.engine.generate(request)).samples[0]


async def test_an_update_is_proved_by_its_digest_and_label(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every control call and its order; the server echoes the label of the published bytes."""
    asked: list[tuple[str, dict[str, Any]]] = []
    post: Post = bench.engine._post

    async def noted(path: str, body: dict[str, Any], *rest: Any) -> Any:
        asked.append((body.get("method", path), body))
        return await post(path, body, *rest)

    monkeypatch.setattr(bench.engine, "_post", noted)
    asking = asyncio.create_task(bench.engine.generate(bench.ask("crossing")))
    await bench.until_tokens(20)
    await bench.update(1, seed=1)
    order = [name for name, _ in asked if name != "penstock_staged"]
    assert order == [
        "penstock_stage", "/pause?mode=keep&clear_cache=true", "penstock_intact", "/start_weight_update",
        "/update_weights", "/finish_weight_update", "penstock_intact",
        "/reset_prefix_cache?reset_running_requests=true", "penstock_release", "/resume",
    ]  # fmt: skip
    label = f"1:{bench.digests[1][:16]}"
    assert dict(asked)["/finish_weight_update"] == {"weight_version": label}
    assert await bench.engine._served_label() == label
    assert [span.version for span in (await asking).samples[0].spans] == [0, 1]


async def test_a_server_that_echoes_another_label_is_dirty(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    post: Post = bench.engine._post

    async def mislabelled(path: str, body: dict[str, Any], *rest: Any) -> Any:
        return await post(path, {"weight_version": "1:stranger"} if path == "/finish_weight_update" else body, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "_post", mislabelled)
        with pytest.raises(WeightsError, match="says that it serves '1:stranger'"):
            await bench.update(1, seed=1)
    assert (await bench.engine.weight_info()).dirty
    await bench.update(2, seed=2)
    assert bench.error(await completion(bench, "clean"), seeds=(0, 1, 2)) < 1e-4


async def test_caches_that_the_server_did_not_drop_make_the_engine_dirty(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers 200, but holds blocks of a completion that was not preempted."""
    post: Post = bench.engine._post

    async def holding(path: str, body: dict[str, Any], *rest: Any) -> Any:
        path = path.replace("clear_cache=true", "clear_cache=false").replace("requests=true", "requests=false")
        return await post(path, body, *rest)

    async def half_way() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine, "_post", holding)
            await bench.update(1, seed=1)

    await bench.fail_half_way(half_way, "could not drop its caches")


async def test_a_server_that_is_killed_in_an_update_serves_no_version_of_it(
    bench: Any, holders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test stops the loading process and kills the server half-way; this ends the engine."""
    engine, post = bench.engine, bench.engine._post
    server = psutil.Process(engine._server._process.pid)
    family = [server, *server.children(recursive=True)]

    async def torn(path: str, body: dict[str, Any], *rest: Any) -> Any:
        if path != "/update_weights":
            return await post(path, body, *rest)
        (worker,) = holders()
        os.kill(worker, signal.SIGSTOP)
        loading = asyncio.create_task(post(path, body, *rest))
        while IN_FLIGHT not in (await engine._server._http.get("/metrics")).text:
            await asyncio.sleep(0.05)
        os.kill(server.pid, signal.SIGKILL)
        return await loading

    asking = asyncio.create_task(engine.generate(bench.ask("crossing")))
    await bench.until_tokens(20)
    async with asyncio.timeout(120):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_post", torn)
            with pytest.raises(Unavailable, match="could not load weights"):
                await bench.update(1, seed=1)
        with pytest.raises(PenstockError):
            await asking
        with pytest.raises((Unavailable, WeightsError)):
            await engine.generate(bench.ask("refused"))
        assert await engine.weight_info() == WeightInfo(version=0, digest=bench.digests[0], dirty=True)
        with pytest.raises((Unavailable, Conflict)):
            await bench.update(2, seed=2)
        await engine.close()
        while any(is_alive(process) for process in family):
            await asyncio.sleep(0.05)
        while holders():  # threads of a process that is no more may still be ending
            await asyncio.sleep(0.05)
