"""The process in which environments of `verifiers` take place: a failure of one episode ends no other."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.services.env.verifiers.child import MAX_STEPS, Episode, Host


class Sent:
    """Stand-in for the channel to the env service; ``steps`` collects the messages."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        """Store the text of a message."""
        self.steps.append(json.loads(message["text"]))


class Env:
    """An environment of four tasks: one exits, one cancels itself, one asks for a turn of the policy, one hangs."""

    def __init__(self) -> None:
        self.taskset = ["leaves", "cancels", "asks", "hangs"]
        self.host: Host | None = None

    async def run_episode(self, task: str, context: Any, *, on_trace: Any) -> Any:
        """Play one episode of ``task``."""
        if task == "leaves":
            raise SystemExit(3)
        if task == "cancels":
            raise asyncio.CancelledError
        if task == "hangs":
            await asyncio.sleep(600)
        assert self.host is not None
        trace = SimpleNamespace(id="t")
        on_trace(trace)
        headers = {"Authorization": "Bearer key", "X-Session-ID": "t"}
        await asyncio.shield(self.host.on_chat(headers, {"messages": [{"role": "user", "content": "hi"}]}))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PENSTOCK_POLICY_API_KEY", "key")
    env = Env()
    env.host = Host(None, env, Sent())  # type: ignore[arg-type]
    return env.host


@pytest.mark.parametrize(
    ("task", "error"), [(0, "RuntimeError: SystemExit: 3"), (1, "the environment cancelled its episode")]
)
async def test_an_episode_that_exits_or_cancels_ends_alone(host: Host, task: int, error: str) -> None:
    async with asyncio.timeout(10):
        await host.on_message({"id": 1, "episode": "e", "purpose": "begin", "task": task})
    assert host._channel.steps == [{"error": error}]  # type: ignore[attr-defined]


async def test_nothing_waits_for_an_episode_that_was_given_up(host: Host) -> None:
    end = {"purpose": "end"}
    async with asyncio.timeout(10):
        await host.on_message({"id": 1, "episode": "asks", "purpose": "begin", "task": 2})
        await host.on_message({"episode": "asks", **end})
        hanging = asyncio.create_task(host.on_message({"id": 2, "episode": "hangs", "purpose": "begin", "task": 3}))
        await asyncio.sleep(0.05)
        assert not hanging.done()
        await host.on_message({"episode": "hangs", **end})
        while rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest)


async def test_turns_that_are_not_fetched_do_not_pile_up() -> None:
    """They arise when a connection breaks again and again, and the environment asks for the next turn."""
    episode = Episode()
    for _ in range(MAX_STEPS):
        episode.ask([{"role": "user", "content": "hi"}], [])
    with pytest.raises(ValueError, match=f"it gave up {MAX_STEPS} turns"):
        episode.ask([{"role": "user", "content": "hi"}], [])
    episode.give_up()
    assert episode.steps.qsize() == MAX_STEPS + 1, "the end of the episode is always reported"
