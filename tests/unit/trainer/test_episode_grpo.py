"""GRPO over episodes: closed forms of the first step, groups without signal, failed episodes, exact resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.batch.episodes import episode_columns
from penstock.services.trainer.ranks.collective import Alone
from penstock.services.trainer.update_rules.episode_grpo import EpisodeGRPORule
from penstock.shared.config.embodied import EpisodeGRPOConfig, PolicyConfig
from penstock.shared.models.episode_policy import EpisodePolicy, build_policy
from tests.unit.trainer.episode_batches import CHUNK, DISCRETE, group_of, spec_of


def policy_of(kind: str = "gaussian") -> EpisodePolicy:
    config = PolicyConfig.parse({"type": kind, "hidden_sizes": [16], "observations": ["state", "goal"]})
    return build_policy(config, DISCRETE if kind == "categorical" else spec_of(), action_chunk=CHUNK, seed=1)


def rule_of(policy: EpisodePolicy, /, **keys: Any) -> EpisodeGRPORule:
    loose = {"learning_rate": 1e-3, "max_grad_norm": 1e6}
    config = EpisodeGRPOConfig.parse({"group_size": 3, "epochs": 2, "minibatches": 3, "policy": loose} | keys)
    return EpisodeGRPORule(config, policy, seed=2, collective=Alone())


def moments_of(rule: EpisodeGRPORule) -> dict[str, Tensor]:
    prefix = "policy.optimizer.exp_avg."
    return {n.removeprefix(prefix): t for n, t in rule.state().items() if n.startswith(prefix)}


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("scale", [False, True])
def test_the_first_gradient_is_that_of_group_advantages(kind: str, *, scale: bool) -> None:
    """The loss is a mean over all decisions, so long episodes count more; the failed episode is in no statistic."""
    policy = policy_of(kind)
    rule = rule_of(policy, epochs=1, minibatches=1, scale_by_std=scale)
    groups = [
        group_of(policy, 0, lengths=(2, 4, 1), failed=(2,)),
        group_of(policy, 1, lengths=(3, 1, 2), failed=()),
    ]
    loss, count = torch.zeros(()), 0
    for group, members in zip(groups, ([0, 1], [0, 1, 2]), strict=True):
        returns = group.returns[members].astype(float)
        deviation = returns.std(ddof=1) + 1e-6 if scale else 1.0
        observations = {name: torch.from_numpy(column) for name, column in group.observations.items()}
        logprobs = policy.evaluate(observations, torch.from_numpy(group.actions)).logprobs_NCA
        for member, value in zip(members, returns, strict=True):
            for t in range(group.cu_seqlens[member], group.cu_seqlens[member + 1]):
                loss = loss - (value - returns.mean()) / deviation * logprobs[t, : group.valid[t]].sum()
                count += 1
    names = [name for name, _ in policy.named_parameters()]
    expected = torch.autograd.grad(loss / count, list(policy.parameters()))
    report = rule.update(episode_columns(groups), update_index=0)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(moments_of(rule)[name], 0.1 * gradient, rtol=1e-3, atol=1e-7)
    assert (report["groups/no_signal"], report["policy/steps"]) == (0, 1)
    assert report["mismatch/logprob"] == pytest.approx(0, abs=1e-6)


def test_a_group_of_equal_returns_teaches_nothing() -> None:
    """A group with only one episode that did not fail teaches nothing either; weight decay is off."""
    policy = policy_of()
    rule = rule_of(policy, entropy_coef=0.0)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    groups = [group_of(policy, 0, lengths=(2, 3), failed=(1,)), group_of(policy, 1)]
    groups[1] = replace(groups[1], returns=np.full(2, 0.3, np.float32))
    report = rule.update(episode_columns(groups), update_index=0)
    assert report["groups/no_signal"] == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_good_episodes_become_likelier_than_bad_ones() -> None:
    policy = policy_of()
    rule = rule_of(policy, epochs=4)
    group = replace(group_of(policy, 0, lengths=(6, 6, 6)), returns=np.array([0.0, 1.0, 0.0], np.float32))
    observations = {name: torch.from_numpy(column) for name, column in group.observations.items()}

    def of_episodes() -> Tensor:
        with torch.no_grad():
            logprobs = policy.evaluate(observations, torch.from_numpy(group.actions)).logprobs_NCA
        return logprobs.sum((1, 2)).reshape(3, 6).sum(1)

    before = of_episodes()
    rule.update(episode_columns([group]), update_index=0)
    gained = of_episodes() - before
    assert gained[1] > max(gained[0], gained[2])
    assert gained[1] > 0


def test_resume_is_exact() -> None:
    first, second = policy_of(), policy_of()
    going, resumed = rule_of(first), rule_of(second)
    going.update(episode_columns([group_of(first, 0)]), update_index=0)
    saved = going.state()
    second.load_state_dict(first.state_dict())
    resumed.load_state(saved)
    batch = episode_columns([group_of(first, 1), group_of(first, 2)])
    assert resumed.update(batch, update_index=1) == going.update(batch, update_index=1)
    assert all(torch.equal(tensor, going.state()[name]) for name, tensor in resumed.state().items())
    assert all(torch.equal(tensor, first.state_dict()[name]) for name, tensor in second.state_dict().items())
