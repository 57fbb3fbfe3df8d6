"""Environments of the real library `verifiers`, in its own interpreter, played by our engine token by token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.services.env.tool_session import ToolSession
from penstock.services.env.verifiers import VerifiersHost
from penstock.services.rollout.conversations.turn_clock import TurnClock
from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.env_requests import EnvRequests
from penstock.services.rollout.group_maker import GroupMaker
from penstock.shared.config.base import with_overrides
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import PromptSource
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import JUDGEMENTS, Ticket
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group, decode_group, encode_group
from penstock.shared.transport.bus import Bus

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SAYS = "hello world and more<eos>"
TEMPLATE = (
    "{% if tools %}?{% endif %}{% for message in messages %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
JOB: dict[str, Any] = {
    "name": "agent",
    "data": {"train": {"type": "tasks", "num_rows": 3}, "shuffle": False, "prompt": {"max_tokens": 16}},
    "reward": {"scorers": [{"type": "environment"}]},
    "algorithm": {"group_size": 2},
    "environment": {"type": "verifiers", "max_observation_tokens": 8, "step_timeout_s": 300, "turn_timeout_s": 600},
    "sampling": {"max_new_tokens": 32},
    "train": {"batch_size": 2, "max_updates": 1},
}


@dataclass
class Play:
    """Engine and env worker of one job."""

    config: JobConfig
    maker: GroupMaker
    requests: EnvRequests
    worker: ToolSession
    source: PromptSource
    tokenizer: Any
    asked: list[ToolRequest] = field(default_factory=list)
    after: Callable[[ToolRequest], None] = lambda request: None

    async def ask(self, clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        """Send a request to the env worker as a rollout session does; record the request, and call ``after``."""
        self.asked.append(request)
        reply = await self.requests.ask("key", clock, name, request)
        self.after(request)
        return reply

    async def until_all_ended(self) -> None:
        """Wait until the env worker holds no episode."""
        async with asyncio.timeout(60):
            while self.worker.status()["tool_episodes"]:
                await asyncio.sleep(0.02)

    async def group(self, ordinal: int = 0) -> Group:
        """Return one group, encoded and decoded as for storage."""
        ticket = Ticket(draw=Draw(ordinal), epoch=1, deadline=0.0, min_version=0)
        group = await self.maker.make(ticket, self.source.train(ordinal), f"k{ordinal}", self.ask)
        return decode_group(encode_group(group)[0])

    def turns(self, group: Group, index: int) -> list[tuple[bool, str]]:
        """Return the runs of tokens of one completion: True if the policy chose them, and their text."""
        start, end = group.cu_seqlens[index], group.cu_seqlens[index + 1]
        mask, tokens = group.mask[start:end], group.token_ids[start:end]
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        return [(bool(mask[a]), self.tokenizer.decode(tokens[a:b].tolist())) for a, b in itertools.pairwise(cuts)]


@pytest.fixture
def play(
    *,
    python_of: Callable[[str], Path],
    client_environment: dict[str, str],
    chain: ModuleType,
    bus: Bus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Function that opens a job on one of the tasksets of this folder."""
    python = python_of("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(HERE / "environments"))
    monkeypatch.setenv("HOME", client_environment["HOME"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    chain.save_chain(tmp_path)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)

    @asynccontextmanager
    async def open_(taskset: str, *changes: str) -> AsyncIterator[Play]:
        model = {"path": str(tmp_path), "tokenizer": str(tmp_path / "tokenizer")}
        spec = with_overrides(JOB, [f"environment.env={{taskset: {{id: {taskset}}}}}", *changes])
        spec["environment"]["python"] = str(python)
        config = JobConfig.parse({**spec, "model": model})
        assert isinstance(config.environment, VerifiersConfig)
        tokenizer = build_tokenizer(config.model)
        engine = open_engine(config.model, tokenizer, max_running=8, seed=0)
        worker = ToolSession(bus, "j", config.environment, drain_s=5)
        requests = EnvRequests(bus, "j", config.environment.step_timeout_s, lambda *_: None, lambda _: None)
        async with AsyncExitStack() as closing:
            closing.push_async_callback(engine.close)
            await engine.start()
            running = asyncio.create_task(worker.run())
            closing.push_async_callback(asyncio.gather, running, return_exceptions=True)
            closing.callback(running.cancel)
            source = PromptSource(config.data_config, tokenizer, 0)
            maker = GroupMaker("j", "w", config, engine, tokenizer)
            yield Play(config, maker, requests, worker, source, tokenizer)

    return open_


async def test_one_turn_and_its_reward(play: Any) -> None:
    async with play("chain-single") as game:
        right, wrong, broken = [await game.group(ordinal) for ordinal in range(3)]
        await game.until_all_ended()
    assert right.meta["prompt"] == "? hi", "the system prompt of the task stands before it"
    assert game.tokenizer.decode(right.prompt_ids.tolist()).endswith("hi")
    assert [game.turns(right, i) for i in range(2)] == [[(True, SAYS)]] * 2
    assert right.meta["completions"] == ["hello world and more"] * 2
    assert [group.meta["row"][JUDGEMENTS] for group in (right, wrong)] == [[1.0, 1.0], [0.0, 0.0]]
    assert not (right.failed | wrong.failed).any()
    assert FINISH_REASONS[right.finish[0]] == "stop"
    assert broken.failed.all(), "an episode that could not be judged is never trained"
    assert "out of order" in broken.meta["error"]


async def test_a_tool_with_state(play: Any) -> None:
    async with play("chain-tool") as game:
        group = await game.group()
    assert not group.failed.any(), group.meta
    assert group.meta["row"][JUDGEMENTS] == [1.0, 1.0]
    call = 'I call\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos>'
    for index in range(2):
        assert game.turns(group, index) == [(True, call), (False, "hi"), (True, SAYS)]
        start, end = group.cu_seqlens[index], group.cu_seqlens[index + 1]
        assert not group.logprobs[start:end][group.mask[start:end] == 0].any()
    messages = [request.arguments["message"] for request in game.asked if request.purpose == "answer"]
    assert [len(message.get("tool_calls", [])) for message in messages].count(1) == 2, "one call of each episode"


async def test_a_conversation_ends_with_its_budget_of_turns(play: Any) -> None:
    async with play("chain-talk") as game:
        whole = await game.group()
    talk = [(True, SAYS), (False, " hi"), (True, SAYS), (False, " hi"), (True, SAYS)]
    assert whole.meta["prompt"] == "<eos> hi"
    assert [[(c, t.replace("<unk>", " ")) for c, t in game.turns(whole, i)] for i in range(2)] == [talk] * 2
    assert whole.meta["row"][JUDGEMENTS] == [pytest.approx(0.3)] * 2
    async with play("chain-talk", "environment.max_turns=2") as game:
        cut = await game.group()
        for pid in [child.pid for child in psutil.Process().children() if "child.py" in " ".join(child.cmdline())]:
            killed = iter([pid])
        game.after = lambda request: _kill(killed) if request.purpose == "answer" else None
        again = await game.group()
    assert not cut.failed.any()
    assert {FINISH_REASONS[code] for code in cut.finish} == {"length"}
    assert cut.meta["row"][JUDGEMENTS] == [pytest.approx(0.2)] * 2, "the played turns are judged"
    assert [len(game.turns(cut, i)) for i in range(2)] == [3, 3]
    assert not again.failed.any(), "episodes whose process died start again"
    assert again.token_ids.tolist() == cut.token_ids.tolist()
    assert {request.state.episode[-2:] for request in game.asked if request.state} >= {"+1"}


async def test_an_environment_that_cannot_be_opened_says_why(play: Any) -> None:
    async with play("no-such-taskset") as game:
        group = await game.group()
        assert "taskset 'no-such-taskset' not found" in game.worker.status()["waiting_for"]
    assert group.failed.all()
    assert "taskset 'no-such-taskset' not found" in group.meta["error"]
    host = VerifiersHost(VerifiersConfig.parse({"env": {"taskset": {"id": "x"}}, "python": "/no/such/python"}))
    await host.start()
    assert host.refused is not None
    assert "'/no/such/python' does not start" in host.refused[1]


def _kill(pids: Any) -> None:
    for pid in pids:
        psutil.Process(pid).kill()
