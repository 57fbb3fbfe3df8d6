"""Tool states of episodes in an env worker: objects of a user's class, each in its own process."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from penstock.services.env import episodes
from penstock.services.env.episodes import EpisodeStore
from penstock.services.env.tools.template import ObjectTemplate
from penstock.shared.config.environment import EnvironmentConfig
from penstock.shared.config.tools import MethodTool
from penstock.shared.errors import Unavailable
from penstock.shared.protocol.tools import EpisodeState, ToolReply, ToolRequest
from tests.processes import is_alive

TOOLS_MODULE = """
import os, subprocess, sys, time

if "limit" in os.environ.get("FORKS", ""):
    fork, left = os.fork, [1]
    def fork_once():
        if not left:
            raise BlockingIOError(11, "no processes left")
        left.pop()
        return fork()
    os.fork = fork_once

class Counter:
    def __init__(self, seed, row):
        self.value, self.row = seed % 100 + row.get("start", 0), row

    def add(self, by):
        if by > 1000:
            raise ValueError("too much")
        self.value += by
        return self.value

    def look(self):
        return f"{self.value}"

    def start(self):
        return str(subprocess.Popen(["sleep", "600"]).pid)

    def break_(self):
        raise RuntimeError("out of order")

    def die(self):
        os._exit(1)

    def hang(self):
        time.sleep(600)

    def reward(self, answer):
        return float(answer == str(self.value))

    def close(self):
        if "closed" in self.row:
            open(self.row["closed"], "w").write(str(self.value))
"""


@pytest.fixture
def user_tools(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("user")
    (folder / "objects_of_a_user.py").write_text(TOOLS_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def method(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of one method of ``Counter`` as a tool."""
    schema = {"type": "object", "properties": {"by": {"type": "number"}}, "required": ["by"]} if name == "add" else {}
    given = {"parameters": schema} if schema else {}
    path = "objects_of_a_user:Counter"
    return {"type": "method", "name": name, "path": path, "description": name, **given, **changes}


class Asking:
    """Sends the numbered requests of one episode to an ``EpisodeStore``."""

    def __init__(self, store: EpisodeStore, episode: str, *, seed: int = 5, **row: Any) -> None:
        self._store, self._state = store, EpisodeState(episode=episode, seed=seed, row=row)
        self.number = 0

    async def __call__(
        self, name: str = "", *, purpose: Any = "call", limit_s: float = 30.0, again: bool = False, **arguments: Any
    ) -> ToolReply:
        self.number -= again
        state = replace(self._state, number=self.number)
        request = ToolRequest(name=name, arguments=arguments, purpose=purpose, state=state)
        reply = await self._store.ask(f"{state.episode}#{self.number}", request, limit_s)
        self.number += 1
        return replace(reply, holder="")


@asynccontextmanager
async def store_of(*names: str, most: int = 8, idle_s: float = 600.0) -> AsyncIterator[EpisodeStore]:
    config = EnvironmentConfig.parse({"tools": [method(name) for name in names]})
    template = ObjectTemplate([tool for tool in config.tools if isinstance(tool, MethodTool)])
    await template.start()
    assert template.refused is None
    store = EpisodeStore(template, most=most, idle_s=idle_s)
    try:
        yield store
    finally:
        await store.close()
        await template.close()


async def test_an_object_lives_as_long_as_its_episode(user_tools: None, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    async with store_of("add", "look", "break_", most=3) as store:
        one, two = Asking(store, "one", closed=str(closed)), Asking(store, "two", start=50)
        assert (await one("add", by=1)).text == "6"
        assert (await two("look")).text == "55", "the state depends on seed and row alone"
        assert (await one("add", by=2, again=False)).text == "8"
        assert (await one("add", by=2, again=True)).text == "8", "a repeated request gets the same answer"
        assert await one("add", by=2000) == ToolReply(status="error", text="too much")
        assert (await one("add")).text == "argument 'by' is missing"
        assert (await one("break_")).status == "failed"
        assert (await one("look")).text == "8", "an exception changes no state"
        assert (await one(purpose="reward", answer="8")).text == "1.0"
        assert (await Asking(store, "three")(purpose="reward", answer="9")).text == "0.0", (
            "an object without calls is created for its reward"
        )
        with pytest.raises(Unavailable, match="has 3 episodes"):
            await Asking(store, "four")("look")
        assert not closed.exists()
        await one(purpose="end")
        assert closed.read_text() == "8"
        assert len(store) == 2
        assert (await Asking(store, "four")("look")).text == "5"
        assert (await one("look")).status == "lost"


async def test_a_state_that_is_gone_is_never_replaced(user_tools: None) -> None:
    async with store_of("add", "look", "die", "hang") as store:
        dies, hangs, lives = (Asking(store, name) for name in ("dies", "hangs", "lives"))
        for asking in (dies, hangs, lives):
            assert (await asking("add", by=1)).status == "ok"
        broken = await asyncio.gather(dies("die"), hangs("hang", limit_s=0.5))
        assert [reply.status for reply in broken] == ["failed"] * 2
        assert [reply.text for reply in broken] == [
            "the process of tool 'die' died",
            "tool 'hang' took longer than 0.5 s and was killed",
        ]
        after = [await asking("look") for asking in (dies, hangs)]
        assert [reply.text for reply in after] == [reply.text for reply in broken]
        assert all(reply.gone for reply in (*broken, *after))
        assert (await lives("look")).text == "6", "other episodes are not affected"
        late = Asking(store, "unknown")
        late.number = 3
        assert (await late("look")).status == "lost", "another worker had the first three requests"
        dies.number += 1
        lives.number += 1
        assert (await lives("look")).status == "lost", "a request is missing"


async def test_a_state_that_nobody_uses_is_given_up(user_tools: None) -> None:
    async with store_of("look", idle_s=0.2) as store:
        asking = Asking(store, "idle")
        assert (await asking("look")).status == "ok"
        giving_up = asyncio.create_task(store.give_up_idle())
        async with asyncio.timeout(30):
            while len(store):
                await asyncio.sleep(0.02)
        giving_up.cancel()
        assert (await asking("look")).status == "lost"


@pytest.mark.long
async def test_a_slow_failing_end_of_an_episode_ends_no_other(
    user_tools: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with store_of("look", idle_s=0.4) as store:
        slow, used, later = (Asking(store, name) for name in ("slow", "used", "later"))
        assert [(await asking("look")).status for asking in (slow, used)] == ["ok", "ok"]
        handle = store._held["slow"].handle
        assert handle is not None
        close = handle.close

        async def fail_late() -> None:
            await close()
            await asyncio.sleep(0.5)
            raise RuntimeError("somebody else reads the stream")

        handle.close = fail_late  # type: ignore[method-assign]
        giving_up = asyncio.create_task(store.give_up_idle())
        async with asyncio.timeout(30):
            while "slow" in store._held:
                assert (await used("look")).status == "ok"
                await asyncio.sleep(0.02)
            assert (await later("look")).status == "ok"
            while "later" in store._held:
                assert (await used("look")).status == "ok", "while others end"
                await asyncio.sleep(0.02)
        giving_up.cancel()
        assert "somebody else reads the stream" in caplog.text


@pytest.mark.long
async def test_a_state_whose_first_answer_nobody_received_is_given_up_soon(
    user_tools: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "UNHEARD_S", -59.0)  # so that it stays for 1 s
    async with store_of("look") as store:
        unheard, kept, used = (Asking(store, name) for name in ("unheard", "kept", "used"))
        for asking in (unheard, kept, used):
            assert (await asking("look")).status == "ok"
        await kept(purpose="keep", again=True)
        await used("look")
        giving_up = asyncio.create_task(store.give_up_idle())
        async with asyncio.timeout(30):
            while len(store) == 3:
                await asyncio.sleep(0.02)
        await asyncio.sleep(1.1)
        giving_up.cancel()
        assert [(await asking("look")).status for asking in (unheard, kept, used)] == ["lost", "ok", "ok"]


async def test_a_state_that_is_ready_too_late_is_given_up(user_tools: None) -> None:
    async with store_of("look") as store:
        world = store._world
        begin = world.begin

        async def begin_late(state: EpisodeState) -> Any:
            handle = await begin(state)
            await asyncio.sleep(0.3)
            return handle

        world.begin = begin_late  # type: ignore[method-assign]
        request = ToolRequest(name="look", state=EpisodeState(episode="e", seed=5), start_by=time.time() + 0.2)
        with pytest.raises(Unavailable, match="too late"):
            await store.ask("e#0", request, 30.0)
        assert len(store) == 0
        assert (await Asking(store, "e")("look")).text == "5"


async def test_a_fork_that_fails_takes_no_other_episode_with_it(
    user_tools: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKS", "limit")
    async with store_of("look") as store:
        lives = Asking(store, "lives")
        assert (await lives("look")).text == "5"
        refused = await Asking(store, "refused")("look")
        assert (refused.status, "no processes left" in refused.text) == ("failed", True)
        assert (await lives("look")).text == "5"


@pytest.mark.long
async def test_episodes_whose_forking_process_died_are_lost(user_tools: None) -> None:
    async with store_of("look") as store:
        one, two = Asking(store, "one"), Asking(store, "two")
        assert [(await asking("look")).status for asking in (one, two)] == ["ok", "ok"]
        children = [p for p in psutil.Process().children() if is_alive(p)]
        [forker] = [p for p in children if "penstock.services.env.tools.forks" in p.cmdline()]
        episodes = forker.children(recursive=True)
        forker.send_signal(signal.SIGKILL)
        assert len(episodes) >= 2
        async with asyncio.timeout(30):
            while any(is_alive(episode) for episode in episodes):
                await asyncio.sleep(0.02)
        assert [(await asking("look")).status for asking in (one, two)] == ["lost", "lost"]
        assert (await Asking(store, "three")("look")).text == "5"


async def test_nothing_that_an_episode_started_outlives_its_job(user_tools: None) -> None:
    config = EnvironmentConfig.parse({"tools": [method("start")]})
    template = ObjectTemplate([tool for tool in config.tools if isinstance(tool, MethodTool)])
    store = EpisodeStore(template, most=8, idle_s=600)
    ended, held = [int((await Asking(store, name)("start")).text) for name in ("ended", "held")]
    await Asking(store, "ended")(purpose="end")
    await template.close()
    await store.close()
    async with asyncio.timeout(10):
        while any(is_alive(pid) for pid in (ended, held)):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "nowhere:Counter"}, "cannot be imported"),
        ({"method": "no"}, "no method 'no'"),
        ({"path": "os:getcwd"}, "not a class"),
    ],
)
async def test_objects_that_cannot_be_created_fail_with_the_reason(
    user_tools: None, changes: dict[str, Any], message: str
) -> None:
    config = EnvironmentConfig.parse({"tools": [method("look", **changes)]})
    template = ObjectTemplate([tool for tool in config.tools if isinstance(tool, MethodTool)])
    await template.start()
    assert template.refused is not None
    assert message in template.refused[1]
    store = EpisodeStore(template, most=1, idle_s=60)
    reply = await Asking(store, "e")("look")
    assert (reply.status, message in reply.text) == ("failed", True)
