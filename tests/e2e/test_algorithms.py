"""Algorithms that need more than groups of samples: a second model, a greedy completion, or state of their own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.protocol.events import BatchTrained, Checkpointed, LineageForked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.long
def test_actor_and_critic_continue_after_a_crash(stack: Any) -> None:
    """A new trainer loads critic, KL coefficient and reward statistics, and repeats batches bit for bit."""
    total = 100  # dozens of updates pass before the status shows the fifth
    algorithm = {
        "type": "ppo",
        "critic": {"warmup_updates": 2},
        "kl": {"coef": 0.05, "place": "reward", "adaptive": {"target": 0.1, "horizon": 200}},
        "shaping": {"normalise": True},
    }
    job = stack.submit(f"train.max_updates={total}", "train.minibatches=2", "checkpoint.every=3", algorithm=algorithm)
    stack.reach(job, 5)
    stack.kill("trainer-0")
    record = stack.finish(job, 120)
    assert (record.status.phase, record.status.step) == ("succeeded", total), record.status
    stack.check_audit(job)
    events = stack.ledger(job)
    trained = [event for event in events if isinstance(event, BatchTrained)]
    assert not any(isinstance(event, LineageForked) for event in events)
    assert len({event.trainer_epoch for event in trained}) == 2
    newest = [stack.data_dir / event.path for event in events if isinstance(event, Checkpointed)][-1]
    files = msgspec.json.decode((newest / "manifest.json").read_bytes())["files"]
    assert {"critic/model.safetensors", "critic/optimizer.safetensors", "rule.safetensors"} <= files.keys()
    stack.check_replay(job, at_least=1)
    series = stack.client.metrics(job, names="critic/explained_variance,kl/coef,optimizer/steps")["series"]
    assert series["optimizer/steps"] == [0, 0] + [2] * (total - 2), "the critic learns alone first"
    assert len(set(series["kl/coef"])) > total / 2


@pytest.mark.long
def test_a_greedy_completion_is_the_baseline_and_is_never_trained(stack: Any) -> None:
    job = stack.submit("train.max_updates=4", algorithm={"type": "remax", "group_size": 2})
    assert stack.finish(job).status.phase == "succeeded"
    stack.check_audit(job)
    groups = stack.groups(job).values()
    assert groups
    assert all(group.greedy.tolist() == [False, False, True] for group in groups)
    assert all(group.baseline == group.rewards[2] for group in groups)
    series = stack.client.metrics(job, names="sequences/count,groups/count,advantage/max")["series"]
    assert series["sequences/count"] == [16] * 4
    assert series["groups/count"] == [8] * 4
