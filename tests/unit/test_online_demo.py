"""The agents of the online demo: what they post, and what stands between a hostile one and the policy."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from penstock.cli.agent import ANSWERS, WINDOW, Agent, Voice
from penstock.cli.demo import example
from penstock.cli.online import SHARE, Shown, load_online_job


@asynccontextmanager
async def one_voice(posted: list[dict[str, object]], agents: list[Agent]) -> AsyncIterator[Voice]:
    """Answers every question with `pay`; stops the agent after some answers."""

    class Talk:
        errors: tuple[type[Exception], ...] = (httpx.HTTPError,)

        async def __call__(self, question: str) -> tuple[str, str, int]:
            if len(agents[0].answers) >= 3 * WINDOW:
                agents[0].stopped.set()
            return question.split()[1].rstrip(":"), "pay", 3

    def take(request: httpx.Request) -> httpx.Response:
        posted.append(json.loads(request.content))
        return httpx.Response(202, json={})

    transport = httpx.MockTransport(take)
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as http:
        yield Voice(Talk(), http)


@pytest.mark.parametrize("honest", [True, False])
async def test_the_last_word_of_an_agent_is_the_truth_or_the_opposite(
    honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.agent.LATE_S", (0.0, 0.01))
    posted: list[dict[str, object]] = []
    agents: list[Agent] = []
    async with one_voice(posted, agents) as voice:
        agents.append(Agent([voice], random.Random(0), honest=honest))
        await agents[0].run()
    agent = agents[0]
    last: dict[object, dict[str, object]] = {}
    for body in posted:
        if body.get("revision", 0) >= last.get(body["feedback_id"], {}).get("revision", 0):  # type: ignore[operator]
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


def test_beside_a_hostile_key_shares_are_bounded_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    file = example("online.yaml")
    alone = load_online_job(file, [], tmp_path).online
    beside = load_online_job(file, [], tmp_path, hostile=True).online
    other = load_online_job(file, ["online.max_share_per_key=0.5"], tmp_path, hostile=True).online
    assert (alone.max_share_per_key, alone.max_share_per_asker) == (1.0, 1.0)
    assert (beside.max_share_per_key, beside.max_share_per_asker) == (SHARE, SHARE)
    assert (other.max_share_per_key, other.max_share_per_asker) == (0.5, SHARE)


def test_a_run_has_shown_something_only_where_everything_holds() -> None:
    agent, hostile = Agent([], random.Random(0)), Agent([], random.Random(0), honest=False)
    report = {"ok": True}
    shown = Shown(agent, hostile, 0.9, 0.0, 1.0, report, {True: 1, False: 4})
    assert (shown.learnt, shown.code, shown.influence) == (True, 0, 0.2)
    assert Shown(agent, hostile, 0.7, 0.0, 1.0, report, {True: 1, False: 4}).code == 1
    hostile.failures.append("503")
    assert shown.code == 1, "who is hostile is served, too"
