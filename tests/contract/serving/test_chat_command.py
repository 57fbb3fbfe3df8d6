"""`penstock chat` against a gateway and a worker: its output, its requests and its feedback."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.app import app
from penstock.cli.live.chat import Thumbs, _values
from penstock.shared.config.online.section import MetricConfig
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, bare_id

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def run(stack: Any, *words: str, typed: str = "") -> Result:
    """Run the command in a thread, because the gateway runs in this one; ``typed`` is its standard input."""
    env = {"PENSTOCK_URL": stack.url, "PENSTOCK_API_KEY": ""}
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["chat", "agent", *words], env=env, input=typed))


async def feedback(stack: Any) -> list[Feedback]:
    messages = await stack.bus.read(subjects.FEEDBACK, subjects.feedback(stack.job))
    return [item for message in messages for item in unpack(message.data, FeedbackBatch)[0].items]


async def test_one_answer_is_streamed_and_nothing_else_is_printed(agent: Any) -> None:
    result = await run(agent, "hi", "--temperature", "0")
    assert (result.exit_code, result.stdout) == (0, "hello world and more\n")
    assert (await agent.interactions())[-1].sampling.temperature == 0


async def test_a_thumb_is_posted_about_the_answer(agent: Any) -> None:
    before = len(await feedback(agent))
    result = await run(agent, "hi", "--temperature", "0", "--rate", typed="what?\nn\n")
    assert result.exit_code == 0, result.output
    (item,) = (await feedback(agent))[before:]
    assert (item.metric, item.value) == ("reward", -1.0)
    assert item.inference == bare_id((await agent.interactions())[-1].id)
    silent = await run(agent, "hi", "--rate", typed="\n")
    assert silent.exit_code == 0
    assert len(await feedback(agent)) == before + 1


async def test_a_conversation_continues_from_its_earlier_turns(agent: Any) -> None:
    before, posted = len(await agent.interactions()), len(await feedback(agent))
    words = ("--rate", "--temperature", "0", "--system", "tool", "--episode", "new")
    result = await run(agent, *words, typed="hi\ny\n\nhi\n\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "hello world and more\n" * 2
    first, second = (await agent.interactions())[before:]
    assert first.episode == second.episode
    assert not first.alone
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert len(second.prompt_ids) > len(first.prompt_ids) + len(first.token_ids) - 1
    reward, end = (await feedback(agent))[posted:]
    assert (reward.inference, reward.value) == (bare_id(first.id), 1.0)
    assert (end.episode, end.final) == (first.episode, True), "a new episode ends with the conversation"


async def test_the_length_and_the_episode_are_chosen(agent: Any) -> None:
    result = await run(agent, "hi", "--episode", "mine", "--max-tokens", "2")
    assert result.stdout == "hello wor\n"
    assert (await agent.interactions())[-1].episode == "mine"


async def test_as_json_each_answer_and_each_verdict_is_a_line(agent: Any) -> None:
    words = ("--json", "--rate", "--temperature", "0", "--episode", "new")
    result = await run(agent, *words, typed="hi\ny\ntool\n\n")
    assert result.exit_code == 0, result.output
    answer, verdict, call = [json.loads(line) for line in result.stdout.splitlines()]
    first, second = (await agent.interactions())[-2:]
    assert answer == {
        "type": "answer", "interaction": bare_id(first.id), "episode": answer["episode"], "model": "agent@0",
        "policy_version": 0, "text": "hello world and more", "finish_reason": "stop",
    }  # fmt: skip
    assert bare_id(answer["episode"]) == first.episode == second.episode
    item = (await feedback(agent))[-2]
    assert verdict == {
        "type": "feedback", "feedback_id": item.id, "interaction": answer["interaction"], "metric": "reward",
        "value": 1.0,
    }  # fmt: skip
    assert bare_id(call["interaction"]) == second.id
    once = await run(agent, "hi", "--json", "--max-tokens", "2")
    assert (json.loads(once.stdout)["text"], json.loads(once.stdout)["finish_reason"]) == ("hello wor", "length")


async def test_an_error_is_one_line_and_an_exit_code(agent: Any) -> None:
    unknown = await run(agent, "hi", "--rate", "--metric", "taste")
    assert unknown.exit_code == 2
    assert "--metric taste: agent declares reward" in unknown.output
    env = {"PENSTOCK_URL": agent.url, "PENSTOCK_API_KEY": ""}
    unserved = await asyncio.to_thread(lambda: CliRunner().invoke(app, ["chat", "nobody", "hi"], env=env))
    assert unserved.exit_code == 1
    assert "no running job serves a model 'nobody'" in unserved.output
    nowhere = await asyncio.to_thread(
        lambda: CliRunner().invoke(app, ["chat", "agent", "hi"], env={"PENSTOCK_URL": "http://127.0.0.1:9"})
    )
    assert nowhere.exit_code == 4


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ({"type": "boolean"}, (True, False)),
        ({"type": "boolean", "when_true": -1.0, "when_false": 1.0}, (False, True)),
        ({"type": "float", "clip": (0.0, 2.0), "weight": 0.5}, (4.0, 0.0)),
        ({"type": "float", "weight": -1.0}, (-1.0, 1.0)),
    ],
)
async def test_a_thumb_is_the_best_or_the_worst_value_of_a_metric(metric: Any, expected: Any) -> None:
    assert _values("m", MetricConfig(**metric)) == Thumbs("m", *expected)
