"""Jobs whose policy calls tools, through all services: it learns to, an object has state, and the audit passes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.protocol.trajectory import Group

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k-tool.yaml"
TOTAL = 24
SMALL = (
    "model.config.num_layers=2", "model.config.intermediate_size=128", "warm_start.steps=45",
    "warm_start.learning_rate=0.004", "optimizer.learning_rate=0.0005", "optimizer.schedule=constant",
    "train.minibatches=1", "evaluation.every=0", "limits.byte_budget=33554432", "environment.tool_timeout_s=2",
)  # fmt: skip
CALCULATOR = {
    "type": "method", "name": "compute", "path": "e2e_environments:Calculator", "description": "Computes.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}  # fmt: skip


@pytest.fixture
def annotations(tmp_path: Path) -> Path:
    """File like that of GSM8K, with calculator annotations in the solutions."""
    dice = random.Random(0)
    path = tmp_path / "annotations.jsonl"
    lines = []
    for _ in range(600):
        a, b, sign = dice.randint(2, 99), dice.randint(2, 9), dice.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        lines.append(json.dumps({"question": "?", "answer": f"<<{a}{sign}{b}={value}>>{value}"}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def make_spec(annotations: Path) -> Callable[..., dict[str, Any]]:
    """Function that returns the example with a smaller model, another data file and changes."""

    def make(*changes: str) -> dict[str, Any]:
        spec = with_overrides(load_yaml(EXAMPLE), [*SMALL, *changes])
        for source in (spec["data"]["train"], spec["data"]["eval"]):
            source.pop("exclude_path", None)
            source["path"] = str(annotations)
        return spec

    return make


def test_a_policy_learns_to_call_its_tool(stack: Any, make_spec: Callable[..., dict[str, Any]]) -> None:
    spec = make_spec(f"train.max_updates={TOTAL}", f"checkpoint.every={TOTAL // 2}")
    job = stack.client.submit(spec).id
    stack.reach(job, 8, seconds=200)
    stack.kill("env-0")  # during calls: rollout workers send them again, and nothing fails
    record = stack.finish(job, seconds=240)
    assert (record.status.phase, record.status.step) == ("succeeded", TOTAL)
    series = stack.client.metrics(job, names="reward/mean,tokens/observed")["series"]
    rewards, observed = ([x for x in series[name] if x is not None] for name in ("reward/mean", "tokens/observed"))
    assert np.mean(rewards[-5:]) > np.mean(rewards[:3]) + 0.15, rewards
    assert len(observed) == TOTAL
    assert min(observed) > 0
    groups = stack.groups(job)
    assert len(groups) > 32, "those since a retained checkpoint"
    for group in groups.values():
        check_turns(group)
    stack.check_audit(job)
    stack.check_replay(job, at_least=TOTAL // 2)


def test_an_object_of_the_user_lives_for_one_episode(stack: Any, make_spec: Callable[..., dict[str, Any]]) -> None:
    spec = make_spec("train.max_updates=6", "checkpoint.every=3", "environment.restarts=3")
    spec["environment"]["tools"], spec["reward"]["scorers"] = [CALCULATOR], [{"type": "environment"}]
    job = stack.client.submit(spec).id
    stack.reach(job, 2, seconds=100)
    stack.kill("env-0")  # while objects live: their episodes start again
    record = stack.finish(job, seconds=100)
    assert (record.status.phase, record.status.step) == ("succeeded", 6)
    groups = stack.groups(job).values()
    for group in groups:
        check_turns(group)
    assert {0.5, 1.0} <= {float(reward) for group in groups for reward in group.rewards} <= {0.0, 0.5, 1.0}
    stack.check_audit(job)
    stack.check_replay(job, at_least=3)


def check_turns(group: Group) -> None:
    """Check that observations lie between turns of the policy and have no log-prob."""
    assert not group.failed.any()
    for start, end in zip(group.cu_seqlens, group.cu_seqlens[1:], strict=False):
        mask, logprobs = group.mask[start:end], group.logprobs[start:end]
        assert mask[0] == mask[-1] == 1
        assert not logprobs[mask == 0].any()
