"""Agents of the online demo: their requests and feedback, and the limits on the influence of a hostile agent."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.demo.agent import ANSWERS, WINDOW, Agent, agent_clients, sdk
from penstock.cli.demo.online import SHARE, Shown, load_online_job
from penstock.cli.deployment.machine import example
from penstock.shared.errors import ConfigError


class OneClient:
    """Stand in for a client of the demo: answer each question with `pay`, and stop the agent after some answers."""

    errors: tuple[type[Exception], ...] = (ConnectionError,)

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.agent: Agent | None = None

    async def ask(self, question: str) -> tuple[str, str, int]:
        assert self.agent is not None
        if len(self.agent.answers) >= 3 * WINDOW:
            self.agent.stopped.set()
        return question.split()[1].rstrip(":"), "pay", 3

    async def post_feedback(self, feedback: dict[str, Any]) -> bool:
        self.posted.append(dict(feedback))
        return True


CHAT = {
    "id": "chatcmpl-7", "object": "chat.completion", "created": 1, "model": "router@3",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "pay"}}],
}  # fmt: skip


@asynccontextmanager
async def endpoint(status: int, seen: list[tuple[str, dict[str, str], dict[str, Any]]]) -> AsyncIterator[str]:
    """Serve chats with ``status`` and accept all feedback; ``seen`` collects path, headers and body of each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                path, body = first.split()[1], json.loads(await reader.readexactly(int(headers["content-length"])))
                seen.append((path, headers, body))
                chat = path.endswith("/chat/completions")
                reply = json.dumps(CHAT if chat else {}).encode()
                code, wait = status if chat else 202, "retry-after-ms: 1\r\n"
                head_out = f"HTTP/1.1 {code} X\r\ncontent-type: application/json\r\n{wait}content-length: {len(reply)}"
                writer.write(f"{head_out}\r\n\r\n".encode() + reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def talk_until(agent: Agent, done: str) -> None:
    """Run the agent until its list ``done`` (`answers` or `failures`) has an entry."""
    task = asyncio.create_task(agent.run())
    async with asyncio.timeout(60):
        while not getattr(agent, done):
            await asyncio.sleep(0.01)
    agent.stopped.set()
    await task


async def test_agents_use_the_official_sdk_and_read_the_version_from_its_response() -> None:
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
    async with endpoint(200, seen) as url, agent_clients(url, "router", ["sk-one"], each=3) as found:
        assert len(found) == 3
        agent = Agent(found, random.Random(0))
        await talk_until(agent, "answers")
    chats = [(path, headers, body) for path, headers, body in seen if path == "/v1/chat/completions"]
    assert len(chats) == len(agent.answers)
    assert all(headers["user-agent"].startswith("AsyncOpenAI/Python") for _, headers, _ in chats)
    assert {headers["authorization"] for _, headers, _ in seen} == {"Bearer sk-one"}
    assert chats[0][2]["model"] == "router"
    assert {answer.version for answer in agent.answers} == {3}
    feedback = [body for path, _, body in seen if path == "/feedback"]
    assert {body["inference_id"] for body in feedback} == {"chatcmpl-7"}
    assert agent.failures == []


async def test_a_request_on_which_the_sdk_gives_up_is_a_failure() -> None:
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
    async with endpoint(503, seen) as url, agent_clients(url, "router", [""]) as found:
        agent = Agent(found, random.Random(0))
        await talk_until(agent, "failures")
    assert len(seen) == 3 * len(agent.failures), "the SDK repeats each request twice by itself"
    assert "503" in agent.failures[0]
    assert agent.answers == []


def test_without_the_sdk_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[demo\]'"):
        sdk()
    result = CliRunner().invoke(app, ["demo", "online", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "penstock[demo]" in result.stderr
    assert not (tmp_path / "logs").exists(), "nothing was started"


def test_only_the_demo_imports_the_sdk() -> None:
    code = "import sys, penstock.cli, penstock.client; assert 'openai' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("honest", [True, False])
async def test_the_final_feedback_of_an_agent_is_right_or_inverted(
    honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.demo.agent.LATE_S", (0.0, 0.01))
    client = OneClient()
    client.agent = agent = Agent([client], random.Random(0), honest=honest)
    await agent.run()
    last: dict[str, dict[str, Any]] = {}
    for body in client.posted:
        if body.get("revision", 0) >= last.get(body["feedback_id"], {}).get("revision", 0):
            last[body["feedback_id"]] = body
    assert len(last) == len(agent.answers)
    for body in last.values():
        right = ANSWERS[str(body["inference_id"])] == "pay"
        assert body["value"] is (right if honest else not right)
    assert 0.15 < agent.rate < 0.35
    assert agent.late > 0
    assert agent.twice > 0
    assert agent.corrected > 0
    assert agent.failures == []


def test_with_a_hostile_key_shares_are_limited_unless_the_job_sets_them(tmp_path: Path) -> None:
    file = example("online.yaml")
    alone = load_online_job(file, [], tmp_path).online
    beside = load_online_job(file, [], tmp_path, hostile=True).online
    other = load_online_job(file, ["online.max_share_per_key=0.5"], tmp_path, hostile=True).online
    assert (alone.max_share_per_key, alone.max_share_per_asker) == (1.0, 1.0)
    assert (beside.max_share_per_key, beside.max_share_per_asker) == (SHARE, SHARE)
    assert (other.max_share_per_key, other.max_share_per_asker) == (0.5, SHARE)


def test_an_online_run_succeeds_only_if_every_check_passes() -> None:
    agent, hostile = Agent([], random.Random(0)), Agent([], random.Random(0), honest=False)
    report = {"ok": True}
    shown = Shown(agent, hostile, 0.9, 0.0, 1.0, report, {True: 1, False: 4})
    assert (shown.learnt, shown.code, shown.influence) == (True, 0, 0.2)
    assert Shown(agent, hostile, 0.7, 0.0, 1.0, report, {True: 1, False: 4}).code == 1
    hostile.failures.append("503")
    assert shown.code == 1, "the hostile agent must be served, too"
