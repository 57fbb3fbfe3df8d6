"""Supervised training before version 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import Demonstration
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]
ROWS = [
    Demonstration([5, 14, 6, 18], [15, 16], [1, 1]),
    Demonstration([7, 14, 7, 18], [9, 2], [1, 1]),
    Demonstration([4, 18], [4], [1]),
]
EOS = 2


def test_first_loss_is_the_cross_entropy_of_answers_and_end(make_config: Config) -> None:
    learner = Learner(make_config())
    total = count = 0.0
    with torch.no_grad():
        for prompt, answer, _ in ROWS:
            ids = torch.tensor([*prompt, *answer, *([] if answer[-1] == EOS else [EOS])])
            logits = learner.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
            total += cross_entropy(logits, ids[len(prompt) :], reduction="sum").item()
            count += len(ids) - len(prompt)
    seen: list[tuple[int, float]] = []
    learner.warm_start([ROWS], lambda step, loss: seen.append((step, loss)))
    assert seen == [(1, pytest.approx(total / count, abs=1e-5))]


def test_responses_of_an_environment_are_read_but_not_learnt(make_config: Config) -> None:
    learner = Learner(make_config())
    prompt, answer = [5, 18], [9, 30, 31, 7, EOS]
    with torch.no_grad():
        logits = learner.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        losses = cross_entropy(logits, torch.tensor(answer), reduction="none")
    seen: list[float] = []
    learner.warm_start([[Demonstration(prompt, answer, [1, 0, 0, 1, 1])]], lambda _, loss: seen.append(loss))
    assert seen == [pytest.approx(losses[[0, 3, 4]].mean().item(), abs=1e-5)]


def test_a_warm_start_learns_and_leaves_a_fresh_optimizer(make_config: Config) -> None:
    learner = Learner(make_config(warm_start={"steps": 30, "learning_rate": 1e-2}))
    losses: list[float] = []
    learner.warm_start([ROWS] * 30, lambda step, loss: losses.append(loss))
    assert len(losses) == 30
    assert losses[0] > 2
    assert losses[-1] < 0.3
    moments = learner.state().models["policy"].optimizer
    assert not any(tensor.any() for name, tensor in moments.items() if not name.startswith("master."))


def test_the_reference_policy_is_the_warm_one(make_config: Config, batch: list[Group]) -> None:
    learner = Learner(make_config(algorithm={"kl": {"coef": 0.5}}))
    learner.warm_start([ROWS] * 3)
    state, shard = learner.state().models["policy"], BatchShard.whole(batch)
    assert all(torch.equal(tensor, state.reference[name]) for name, tensor in state.weights.items())
    assert learner.update(shard, update_index=0)["policy/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert learner.update(shard, update_index=1)["policy/kl_ref"] > 1e-6


def test_the_critic_starts_from_the_body_of_the_warm_policy(make_config: Config) -> None:
    learner = Learner(make_config(algorithm={"type": "ppo", "group_size": 4}))
    learner.warm_start([ROWS] * 3)
    policy, critic = (learner.state().models[role].weights for role in ("policy", "critic"))
    assert set(critic) - set(policy) == {"score.weight"}
    assert not critic["score.weight"].any()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in critic.items() if name in policy)


def test_a_row_without_prompt_is_refused(make_config: Config) -> None:
    with pytest.raises(ProtocolError, match="empty prompt"):
        Learner(make_config()).warm_start([[Demonstration([], [5], [1])]])


@pytest.mark.parametrize(("num_steps", "same"), [(1, True), (2, False)])
def test_the_rate_follows_its_schedule(make_config: Config, num_steps: int, same: bool) -> None:
    """The first step uses the peak rate under both schedules; the second of two uses a lower one under ``cosine``."""
    weights = []
    for schedule in ("constant", "cosine"):
        learner = Learner(make_config(warm_start={"steps": 2, "schedule": schedule}))
        learner.warm_start([ROWS] * num_steps)
        weights.append(learner.state().models["policy"].weights)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items()) == same
