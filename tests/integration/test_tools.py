"""Tools of the env service: in processes that can be killed, and over the bus."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.env.episodes import EpisodeBook
from penstock.services.env.service import EnvService
from penstock.services.env.tools.pool import ToolPool
from penstock.services.env.tools.template import ObjectTemplate
from penstock.shared.config.environment import EnvironmentConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.config.tools import MethodTool
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.tools import EpisodeState, ToolReply, ToolRequest
from penstock.shared.transport.bus import Bus

JOB = "job_tools"
TOOLS_MODULE = """
import os, sys, time

def add(a, b=1):
    print("for the log")
    return a + b

def halve(a):
    if a % 2:
        raise ValueError(f"{a} is odd")
    return {"half": a // 2}

def cut():
    return "half a character: \\ud800"

def fail():
    raise RuntimeError("out of order")

def leave():
    sys.exit(3)

def die():
    os._exit(1)

def hang():
    time.sleep(600)

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
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a"],
}


def function(name: str, **changes: Any) -> dict[str, Any]:
    """One of the functions above as a tool."""
    schema = {"parameters": NUMBERS} if name in ("add", "halve") else {}
    path = f"tools_of_a_user:{name}"
    return {"type": "function", "name": name, "path": path, "description": name, **schema, **changes}


@pytest.fixture
def user_tools(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("user")
    (folder / "tools_of_a_user.py").write_text(TOOLS_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@asynccontextmanager
async def pool_of(*tools: dict[str, Any], size: int = 2) -> AsyncIterator[Callable[..., Any]]:
    pool = ToolPool(EnvironmentConfig.parse({"tools": list(tools)}).tools, size)
    await pool.start()

    async def call(name: str, limit_s: float = 30.0, **arguments: Any) -> ToolReply:
        return await pool.call(ToolRequest(name=name, arguments=arguments), limit_s)

    try:
        yield call
    finally:
        await pool.close()


async def test_calculator_and_mistakes_of_the_policy() -> None:
    async with pool_of({"type": "calculator"}) as call:
        assert await call("calculator", expression="48/2") == ToolReply(status="ok", text="24")
        mistakes = [
            await call("calculator", expression="48/"),
            await call("abacus", expression="1"),
            await call("calculator"),
            await call("calculator", expression="1", base=2),
        ]
        assert [reply.status for reply in mistakes] == ["error"] * 4
        assert [reply.text for reply in mistakes] == [
            "the expression is incomplete",
            "there is no tool 'abacus'; there is: calculator",
            "argument 'expression' is missing",
            "there is no argument 'base'; there is: expression",
        ]


async def test_functions_of_a_user(user_tools: None) -> None:
    async with pool_of(*map(function, ("add", "halve", "cut", "fail", "leave", "die", "hang")), size=3) as call:
        assert await call("add", a=1) == ToolReply(status="ok", text="2")
        assert await call("add", a="x", b="y") == ToolReply(status="ok", text="xy")
        assert await call("halve", a=4) == ToolReply(status="ok", text='{"half": 2}')
        assert await call("halve", a=3) == ToolReply(status="error", text="3 is odd")
        broken = await asyncio.gather(call("fail"), call("leave"), call("die"), call("hang", limit_s=0.5))
        assert [reply.status for reply in broken] == ["failed"] * 4
        assert [reply.text for reply in broken] == [
            "tool 'fail' raised RuntimeError: out of order",
            "tool 'leave' raised SystemExit: 3",
            "the process of tool 'die' died",
            "tool 'hang' took longer than 0.5 s and was killed",
        ]
        assert await call("add", a=2) == ToolReply(status="ok", text="3"), "others are not affected"
        assert await call("cut") == ToolReply(status="ok", text="half a character: ?")


async def test_a_call_that_nobody_waits_for_is_not_begun() -> None:
    pool = ToolPool(EnvironmentConfig.parse({"tools": [{"type": "calculator"}]}).tools, 1)
    call = ToolRequest(name="calculator", arguments={"expression": "1"})
    try:
        busy = asyncio.create_task(pool.call(call, 30.0))
        await asyncio.sleep(0)  # it waits for the only process to open, which takes longer than the next one is wanted
        with pytest.raises(Unavailable, match="in time for a call of tool 'calculator'"):
            await pool.call(replace(call, start_by=time.time() + 0.02), 30.0)
        assert busy.done()
        assert await pool.call(replace(call, start_by=time.time() + 60), 30.0) == ToolReply(status="ok", text="1")
    finally:
        await pool.close()


async def test_a_machine_without_processes_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    async with pool_of({"type": "calculator"}) as call:
        reply = await call("calculator", expression="1")
    assert reply.status == "failed"
    assert "a process for tools cannot be started: FileNotFoundError" in reply.text


async def test_a_tool_that_cannot_be_opened_fails_every_call() -> None:
    async with pool_of(function("add", path="no_such_module:add")) as call:
        replies = await asyncio.gather(*(call("add", a=1) for _ in range(3)))
        assert {reply.status for reply in replies} == {"failed"}
        assert "cannot be imported" in replies[0].text
        assert "PYTHONPATH" in replies[0].text


async def test_python_in_the_sandbox() -> None:
    tool = {"type": "python", "time_limit_s": 1, "output_bytes": 1024}
    async with pool_of(tool, size=1) as call:
        good = await call("python", code="import math\nfor i in range(2):\n    print(math.factorial(5) + i)")
        assert good == ToolReply(status="ok", text="120\n121")
        assert (await call("python", code="x = 1")).text == "(no output)"
        wrong = [
            await call("python", code="print('so far')\n\n1 / 0"),
            await call("python", code="def broken(:"),
            await call("python", code="import sys\nsys.exit(4)"),
            await call("python", code="while True: pass"),
            await call("python", code="print('x' * 5000)"),
            await call("python", code="import socket\nsocket.create_connection(('127.0.0.1', 1))"),
        ]
        assert [reply.status for reply in wrong] == ["error"] * 6
        assert wrong[0].text == "so far\nline 3: ZeroDivisionError: division by zero"
        assert "SyntaxError" in wrong[1].text
        assert wrong[2].text == "the program exited with status 4"
        assert wrong[3].text == "the program took longer than 1 s"
        assert wrong[4].text.endswith("the program wrote more than 1024 bytes")
        assert "Error" in wrong[5].text
        assert (await call("python", code="print(x)")).status == "error", "nothing is kept between calls"


def method(name: str, **changes: Any) -> dict[str, Any]:
    """One method of the counter above as a tool."""
    schema = {"type": "object", "properties": {"by": {"type": "number"}}, "required": ["by"]} if name == "add" else {}
    given = {"parameters": schema} if schema else {}
    path = "tools_of_a_user:Counter"
    return {"type": "method", "name": name, "path": path, "description": name, **given, **changes}


class Asking:
    """Asks a book for what an episode wants, in order."""

    def __init__(self, book: EpisodeBook, episode: str, *, seed: int = 5, **row: Any) -> None:
        self._book, self._state = book, EpisodeState(episode=episode, seed=seed, row=row)
        self.number = 0

    async def __call__(
        self, name: str = "", *, purpose: Any = "call", limit_s: float = 30.0, again: bool = False, **arguments: Any
    ) -> ToolReply:
        self.number -= again
        state = replace(self._state, number=self.number)
        request = ToolRequest(name=name, arguments=arguments, purpose=purpose, state=state)
        reply = await self._book.ask(f"{state.episode}#{self.number}", request, limit_s)
        self.number += 1
        return replace(reply, holder="")


@asynccontextmanager
async def book_of(*names: str, most: int = 8, idle_s: float = 600.0) -> AsyncIterator[EpisodeBook]:
    config = EnvironmentConfig.parse({"tools": [method(name) for name in names]})
    template = ObjectTemplate([tool for tool in config.tools if isinstance(tool, MethodTool)])
    await template.start()
    assert template.refused is None
    book = EpisodeBook(template, most=most, idle_s=idle_s)
    try:
        yield book
    finally:
        await book.close()
        await template.close()


async def test_an_object_lives_as_long_as_its_episode(user_tools: None, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    async with book_of("add", "look", "break_", most=3) as book:
        one, two = Asking(book, "one", closed=str(closed)), Asking(book, "two", start=50)
        assert (await one("add", by=1)).text == "6"
        assert (await two("look")).text == "55", "from seed and row, whatever others did"
        assert (await one("add", by=2, again=False)).text == "8"
        assert (await one("add", by=2, again=True)).text == "8", "who asks again gets the same answer"
        assert await one("add", by=2000) == ToolReply(status="error", text="too much")
        assert (await one("add")).text == "argument 'by' is missing"
        assert (await one("break_")).status == "failed"
        assert (await one("look")).text == "8", "an exception of its own takes nothing away"
        assert (await one(purpose="reward", answer="8")).text == "1.0"
        assert (await Asking(book, "three")(purpose="reward", answer="9")).text == "0.0", "it is made to be judged"
        with pytest.raises(Unavailable, match="has 3 episodes"):
            await Asking(book, "four")("look")
        assert not closed.exists()
        await one(purpose="end")
        assert closed.read_text() == "8"
        assert len(book) == 2
        assert (await Asking(book, "four")("look")).text == "5"
        assert (await one("look")).status == "lost"


async def test_a_state_that_is_gone_is_never_replaced(user_tools: None) -> None:
    async with book_of("add", "look", "die", "hang") as book:
        dies, hangs, lives = (Asking(book, name) for name in ("dies", "hangs", "lives"))
        for asking in (dies, hangs, lives):
            assert (await asking("add", by=1)).status == "ok"
        broken = await asyncio.gather(dies("die"), hangs("hang", limit_s=0.5))
        assert [reply.status for reply in broken] == ["failed"] * 2
        assert [reply.text for reply in broken] == [
            "the process of tool 'die' died",
            "tool 'hang' took longer than 0.5 s and was killed",
        ]
        assert [(await asking("look")).text for asking in (dies, hangs)] == [reply.text for reply in broken]
        assert (await lives("look")).text == "6", "others are not affected"
        late = Asking(book, "unknown")
        late.number = 3
        assert (await late("look")).status == "lost", "another worker had the first three requests"
        dies.number += 1
        lives.number += 1
        assert (await lives("look")).status == "lost", "a request is missing"


async def test_a_state_that_nobody_uses_is_given_up(user_tools: None) -> None:
    async with book_of("look", idle_s=0.2) as book:
        asking = Asking(book, "idle")
        assert (await asking("look")).status == "ok"
        giving_up = asyncio.create_task(book.give_up_idle())
        async with asyncio.timeout(30):
            while len(book):
                await asyncio.sleep(0.02)
        giving_up.cancel()
        assert (await asking("look")).status == "lost"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "nowhere:Counter"}, "cannot be imported"),
        ({"method": "no"}, "no method 'no'"),
        ({"path": "os:getcwd"}, "not a class"),
    ],
)
async def test_objects_that_cannot_be_had(user_tools: None, changes: dict[str, Any], said: str) -> None:
    config = EnvironmentConfig.parse({"tools": [method("look", **changes)]})
    template = ObjectTemplate([tool for tool in config.tools if isinstance(tool, MethodTool)])
    await template.start()
    assert template.refused is not None
    assert said in template.refused[1]
    book = EpisodeBook(template, most=1, idle_s=60)
    reply = await Asking(book, "e")("look")
    assert (reply.status, said in reply.text) == ("failed", True)


@asynccontextmanager
async def env_service(bus: Bus) -> AsyncIterator[EnvService]:
    service = EnvService(bus, ServiceSettings())
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_calls_over_the_bus_are_carried_out_once(bus: Bus, user_tools: None) -> None:
    spec = {
        "name": "agent",
        "model": {"config": {}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "environment": {"tools": [{"type": "calculator"}, function("add"), method("look")], "max_turns": 2},
        "train": {"batch_size": 16, "max_updates": 1},
    }
    record = JobRecord(id=JOB, name="agent", created_at=datetime.now(UTC), spec=spec)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())

    async def ask(id: str, name: str, late: bool = False, state: Any = None, **arguments: Any) -> ToolReply:
        start_by = 0.0 if late else math.inf
        data = pack(ToolRequest(name=name, arguments=arguments, start_by=start_by, state=state), job=JOB, id=id)
        subject = subjects.env(state.holder) if state is not None and state.holder else subjects.tools(JOB)
        while True:
            try:
                return unpack(await bus.request(subject, data, deadline_s=10), ToolReply)[0]
            except Unavailable:
                if late:
                    raise
                await asyncio.sleep(0.02)

    async with env_service(bus) as service, asyncio.timeout(60):
        assert (await ask("a", "calculator", expression="2*3")).text == "6"
        again = await asyncio.gather(*(ask("b", "add", a=1) for _ in range(5)))
        assert {reply.text for reply in again} == {"2"}
        assert (await ask("c", "calculator", expression="2*")).status == "error"
        row = service.status()[JOB]
        assert (row["tool_calls"], row["tool_errors"], row["tool_failed"]) == (3, 1, 0), "each id counts once"
        with pytest.raises(Unavailable, match="in time"):
            await ask("d", "calculator", late=True, expression="1+1")
        assert (await ask("d", "calculator", expression="1+1")).text == "2", "it was not begun and is asked for again"
        state = EpisodeState(episode="e", seed=7)
        first = await ask("e#0", "look", state=state)
        state = replace(state, number=1, holder=first.holder)
        assert (first.text, (await ask("e#1", "look", state=state)).text) == ("7", "7")
        assert service.status()[JOB]["tool_episodes"] == 1
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        assert (await ask("e#2", "look", state=replace(state, number=2))).text == "7", "it can end where it is"
        end = ToolRequest(purpose="end", state=replace(state, number=3))
        await bus.notify(subjects.env(first.holder), pack(end, job=JOB, id="e#end"))
        await draining
        assert service.tools == {}
