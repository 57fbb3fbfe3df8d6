"""A job whose policy calls a calculator: through all services it learns to, and its books hold."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.protocol.trajectory import Group

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k-tool.yaml"
TOTAL = 24


@pytest.fixture
def annotations(tmp_path: Path) -> Path:
    """A file like GSM8K's: calculator annotations inside solutions."""
    dice = random.Random(0)
    path = tmp_path / "annotations.jsonl"
    lines = []
    for _ in range(600):
        a, b, sign = dice.randint(2, 99), dice.randint(2, 9), dice.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        lines.append(json.dumps({"question": "?", "answer": f"<<{a}{sign}{b}={value}>>{value}"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_policy_learns_to_call_its_tool(stack: Any, annotations: Path) -> None:
    changes = [
        "model.config.num_layers=2", "model.config.intermediate_size=128",
        "warm_start.steps=45", "warm_start.learning_rate=0.004", "optimizer.learning_rate=0.0005",
        "optimizer.schedule=constant", "train.minibatches=1", f"train.max_updates={TOTAL}", "evaluation.every=0",
        f"checkpoint.every={TOTAL // 2}", "limits.byte_budget=33554432", "environment.tool_timeout_s=2",
    ]  # fmt: skip
    spec = with_overrides(load_yaml(EXAMPLE), changes)
    for source in (spec["data"]["train"], spec["data"]["eval"]):
        source.pop("exclude_path", None)
        source["path"] = str(annotations)
    job = stack.client.submit(spec).id
    stack.reach(job, 8, seconds=200)
    stack.kill("env-0")  # with calls in hand: they are asked for again, and nothing fails
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
    stack.check_books(job)
    stack.check_replay(job, at_least=TOTAL // 2)


def check_turns(group: Group) -> None:
    """Observations lie between turns of the policy and have no log-prob."""
    assert not group.failed.any()
    for start, end in zip(group.cu_seqlens, group.cu_seqlens[1:], strict=False):
        mask, logprobs = group.mask[start:end], group.logprobs[start:end]
        assert mask[0] == mask[-1] == 1
        assert not logprobs[mask == 0].any()
