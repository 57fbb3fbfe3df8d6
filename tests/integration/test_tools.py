"""Tools of the env service, in processes that can be killed, and over the bus."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.env.service import EnvService
from penstock.services.env.tools.pool import ToolPool
from penstock.shared.config.environment import EnvironmentConfig
from penstock.shared.config.service import ServiceSettings
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
        self.value = seed

    def look(self):
        return self.value
"""
LOOK = {"type": "method", "name": "look", "path": "tools_of_a_user:Counter", "description": "look"}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a"],
}


def function(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of one of the functions above as a tool."""
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
        assert await call("add", a=2) == ToolReply(status="ok", text="3"), "other calls are not affected"
        assert await call("cut") == ToolReply(status="ok", text="half a character: ?")


async def test_a_call_that_nobody_waits_for_is_not_begun() -> None:
    pool = ToolPool(EnvironmentConfig.parse({"tools": [{"type": "calculator"}]}).tools, 1)
    call = ToolRequest(name="calculator", arguments={"expression": "1"})
    try:
        busy = asyncio.create_task(pool.call(call, 30.0))
        await asyncio.sleep(0)  # the start of the only process takes longer than the next call may wait
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


@asynccontextmanager
async def env_service(bus: Bus) -> AsyncIterator[EnvService]:
    service = EnvService(bus, ServiceSettings())
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.long
async def test_calls_over_the_bus_are_carried_out_once(bus: Bus, user_tools: None) -> None:
    spec = {
        "name": "agent",
        "model": {"config": {}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "environment": {"tools": [{"type": "calculator"}, function("add"), LOOK], "max_turns": 2},
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
        assert (await ask("e#2", "look", state=replace(state, number=2))).text == "7", (
            "a draining worker still serves its states"
        )
        end = ToolRequest(purpose="end", state=replace(state, number=3))
        await bus.notify(subjects.env(first.holder), pack(end, job=JOB, id="e#end"))
        await draining
        assert service.tools == {}
