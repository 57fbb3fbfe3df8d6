"""PPO over episodes: exact resume, closed forms of the first step, bootstraps, chunks, steps that are not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.ranks.collective import Alone
from penstock.services.trainer.update_rules import NonFiniteStep
from penstock.services.trainer.update_rules.episode_ppo import EpisodePPORule
from penstock.shared.config.embodied import EpisodePPOConfig, PolicyConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.models.control import ValueNetwork
from penstock.shared.models.episode_policy import EpisodePolicy, build_policy
from tests.unit.trainer.episode_batches import CHUNK, DISCRETE, columns_of, spec_of

NAMES = ("state", "goal")


def policy_of(kind: str = "gaussian") -> EpisodePolicy:
    config = PolicyConfig.parse({"type": kind, "hidden_sizes": [16], "observations": NAMES})
    return build_policy(config, DISCRETE if kind == "categorical" else spec_of(), action_chunk=CHUNK, seed=1)


def rule_of(
    policy: EpisodePolicy, /, *, width: int = 16, on_nonfinite: Literal["pause", "skip"] = "pause", **keys: Any
) -> EpisodePPORule:
    config = EpisodePPOConfig.parse({"value_hidden_sizes": [width], "epochs": 2, "minibatches": 3} | keys)
    return EpisodePPORule(config, policy, seed=2, collective=Alone(), on_nonfinite=on_nonfinite)


def value_of(rule: EpisodePPORule, policy: EpisodePolicy, observations: dict[str, Any]) -> Tensor:
    """Return the values of ``observations`` by the value network of ``rule``."""
    network = ValueNetwork(policy.encoder.another(), [16])
    names = [f"value.{name}" for name, _ in network.named_parameters()]
    network.load_state_dict({name.removeprefix("value."): rule.state()[name] for name in names})
    with torch.no_grad():
        values: Tensor = network(policy.read(tensors(observations)))
    return values


def tensors(observations: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in observations.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "tokens"])
def test_resume_is_exact(kind: str) -> None:
    first, second = policy_of(kind), policy_of(kind)
    going, resumed = rule_of(first), rule_of(second)
    going.update(columns_of(first, 0), update_index=0)
    saved, weights = going.state(), {name: tensor.clone() for name, tensor in first.state_dict().items()}
    batch = columns_of(first, 1)
    expected = going.update(batch, update_index=1)
    resumed.load_state(saved)
    second.load_state_dict(weights)
    assert_same(resumed.state(), saved)
    torch.manual_seed(99)
    assert resumed.update(batch, update_index=1) == expected
    assert_same(resumed.state(), going.state())
    assert_same(second.state_dict(), first.state_dict())
    assert expected["mismatch/logprob"] == pytest.approx(0, abs=1e-6), "the policy itself acted"


@pytest.mark.parametrize("kind", ["gaussian", "tokens"])
def test_the_first_gradient_is_the_policy_gradient(kind: str) -> None:
    """At ratio 1, Adam's first moment after one step is a tenth of the unclipped policy gradient.

    Each decision counts with the sum of the rewards and log-probs of its executed actions.
    """
    policy = policy_of(kind)
    loose = {"learning_rate": 1e-3, "max_grad_norm": 1e6}
    keys = {"epochs": 1, "minibatches": 1, "lam": 1.0, "gamma": 0.9, "normalise_advantages": False}
    rule = rule_of(policy, **keys, policy=loose, value=loose)
    batch = columns_of(policy, 0, lengths=(1, 1, 1, 1), terminated=(1, 2))
    assert batch.executed_NC.sum(1).tolist() == [1, 2, 1, 2]
    values = value_of(rule, policy, batch.observations)
    last = value_of(rule, policy, batch.final_observations)
    returns = torch.from_numpy(batch.rewards_N) + 0.9 * torch.where(torch.tensor([False, True, True, False]), 0, last)
    logprobs = policy.evaluate(tensors(batch.observations), torch.from_numpy(batch.actions_NCA)).logprobs_NCA
    of_decision = torch.stack([each[:count].sum() for each, count in zip(logprobs, (1, 2, 1, 2), strict=True)])
    expected = torch.autograd.grad(-((returns - values) * of_decision).mean(), list(policy.parameters()))
    names = [name for name, _ in policy.named_parameters()]
    report = rule.update(batch, update_index=0)
    for name, gradient in zip(names, expected, strict=True):
        moment = rule.state()[f"policy.optimizer.exp_avg.{name}"]
        torch.testing.assert_close(moment, 0.1 * gradient, rtol=1e-4, atol=1e-7)
    assert report["policy/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert report["critic/return"] == pytest.approx(float(returns.mean()), rel=1e-5)
    assert report["loss/value"] == pytest.approx(float((returns - values).square().mean() / 2), rel=1e-5)


def test_actions_that_were_not_executed_teach_nothing() -> None:
    """The weights do not depend on the actions and log-probs stored for actions that were not executed."""
    states = []
    for number in (0.0, 3.0):
        policy = policy_of()
        rule, batch = rule_of(policy), columns_of(policy, 0)
        assert not batch.executed_NC.all()
        unused = ~batch.executed_NC
        actions, logprobs = batch.actions_NCA.copy(), batch.logprobs_NCA.copy()
        actions[unused], logprobs[unused] = number, -number
        rule.update(replace(batch, actions_NCA=actions, logprobs_NCA=logprobs), update_index=0)
        states.append({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    assert_same(*states)


def test_a_cut_off_episode_bootstraps_and_a_terminated_one_does_not() -> None:
    """The episodes differ in their end only, so only the value of the last observation separates their returns."""
    returns = {}
    for terminated in (False, True):
        policy = policy_of()
        rule = rule_of(policy, minibatches=1, lam=1.0, gamma=0.5)
        batch = columns_of(policy, 3, lengths=(2,), terminated=(0,) if terminated else ())
        last = float(value_of(rule, policy, batch.final_observations)[0])
        returns[terminated] = rule.update(batch, update_index=0)["critic/return"]
    rewards = batch.rewards_N.astype(float)
    assert returns[True] == pytest.approx((rewards[0] + 1.5 * rewards[1]) / 2, rel=1e-5)
    assert returns[False] - returns[True] == pytest.approx((0.25 + 0.5) * last / 2, rel=1e-4)


def test_advantages_are_normalised_over_the_whole_batch() -> None:
    """With a value network that returns 0, scaled and shifted rewards give the policy the same update."""
    states = []
    for scale, shift in ((1.0, 0.0), (100.0, 50.0)):
        policy = policy_of()
        rule = rule_of(policy, gamma=0.0)
        zeroed = {n: torch.zeros_like(t) if n.startswith("value.layers.2") else t for n, t in rule.state().items()}
        rule.load_state(zeroed)
        batch = columns_of(policy, 0)
        shifted = replace(batch, rewards_N=(scale * batch.rewards_N + shift).astype(np.float32))
        rule.update(shifted, update_index=0)
        states.append(policy.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-5)


def test_steps_and_early_stop() -> None:
    policy = policy_of()
    report = rule_of(policy).update(columns_of(policy, 0), update_index=0)
    assert (report["policy/steps"], report["value/steps"], report["policy/epochs"]) == (6, 6, 2)
    assert report["policy/std"] == pytest.approx(1, abs=0.01)
    policy = policy_of()
    fast = rule_of(policy, max_kl=1e-3, epochs=50, policy={"learning_rate": 0.05})
    report = fast.update(columns_of(policy, 0), update_index=0)
    assert report["policy/approx_kl"] > 1e-3
    assert report["policy/epochs"] < 50


def test_a_batch_of_fewer_decisions_than_minibatches_makes_fewer_steps() -> None:
    policy = policy_of()
    report = rule_of(policy, minibatches=8).update(columns_of(policy, 0, lengths=(1, 1)), update_index=0)
    assert (report["policy/steps"], report["value/steps"]) == (4, 4)


def test_value_clip_bounds_a_step() -> None:
    """Returns are far away; a value that has moved by the clip gets no gradient, so further epochs do not move it."""
    moved = {}
    for clip in (None, 0.05):
        policy = policy_of()
        keys = {"learning_rate": 1e-2, "max_grad_norm": 1e6}
        rule = rule_of(policy, value_clip=clip, epochs=20, minibatches=1, value=keys)
        batch = columns_of(policy, 0, scale=100.0)
        before = value_of(rule, policy, batch.observations)
        rule.update(batch, update_index=0)
        moved[clip] = float((value_of(rule, policy, batch.observations) - before).abs().max())
    assert moved[0.05] < moved[None] / 2


def test_the_entropy_bonus_widens_the_policy() -> None:
    deviations = {}
    for coef in (0.0, 1.0):
        policy = policy_of()
        keys = {"learning_rate": 1e-2, "max_grad_norm": 1e6}
        report = rule_of(policy, entropy_coef=coef, policy=keys).update(columns_of(policy, 0), update_index=0)
        deviations[coef] = report["policy/std"]
    assert deviations[1.0] > deviations[0.0] + 0.01


def test_mismatch_measures_log_probs_that_are_not_the_policys() -> None:
    """All recorded log-probs are 0.1 too low; k3 of that difference is ``exp(0.1) - 1.1``."""
    policy = policy_of()
    batch = columns_of(policy, 0)
    report = rule_of(policy, epochs=3).update(replace(batch, logprobs_NCA=batch.logprobs_NCA - 0.1), update_index=0)
    assert report["mismatch/logprob"] == pytest.approx(0.1, rel=1e-4)
    assert report["mismatch/kl"] == pytest.approx(np.exp(0.1) - 1.1, rel=1e-3)


def test_a_value_loss_that_is_not_finite_pauses_or_is_skipped() -> None:
    """Squares of the rewards overflow float32: the policy's advantages stay finite, the loss of the values does not."""
    first, second = policy_of(), policy_of()
    pausing, skipping = rule_of(first), rule_of(second, on_nonfinite="skip")
    batch = columns_of(first, 0, scale=1e30)
    with pytest.raises(NonFiniteStep, match="the loss of the value is inf") as found:
        pausing.update(batch, update_index=0)
    assert found.value.changed, "the policy had made a step"
    report = skipping.update(batch, update_index=0)
    assert (report["optimizer/skipped_steps"], report["value/steps"], report["policy/steps"]) == (6, 0, 6)
    assert all(tensor.isfinite().all() for tensor in (*skipping.state().values(), *second.state_dict().values()))


def test_another_value_network_cannot_be_loaded() -> None:
    rule = rule_of(policy_of())
    before = rule.state()
    with pytest.raises(CheckpointError, match="PPO does not fit the model"):
        rule.load_state(rule_of(policy_of(), width=8).state())
    assert_same(rule.state(), before)
