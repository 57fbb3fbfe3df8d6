"""PPO for Gaussian policies: exact resume, closed forms of the first step, bootstraps, and what is refused."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.collective import Alone
from penstock.services.trainer.transitions import Rollout
from penstock.services.trainer.update_rules import NonFiniteStep
from penstock.services.trainer.update_rules.gaussian_ppo import GaussianPPORule
from penstock.shared.algorithms.gaussian import gaussian_logprobs
from penstock.shared.config.embodied import EpisodePPOConfig, PolicyConfig
from penstock.shared.errors import CheckpointError, ProtocolError
from penstock.shared.models.control import ValueNetwork

OBSERVATION, ACTION = 3, 2


def rule_of(
    *,
    width: int = 16,
    on_nonfinite: Literal["pause", "skip"] = "pause",
    **keys: Any,
) -> GaussianPPORule:
    config = EpisodePPOConfig.parse({"value_hidden_sizes": [width], "epochs": 2, "minibatches": 3} | keys)
    return GaussianPPORule(
        config, PolicyConfig(hidden_sizes=(width,)), observation_size=OBSERVATION, action_size=ACTION, seed=2,
        collective=Alone(), on_nonfinite=on_nonfinite,
    )  # fmt: skip


def rollout_of(
    rule: GaussianPPORule, seed: int, *, scale: float = 1.0, lengths: tuple[int, ...] = (5, 1, 9)
) -> Rollout:
    """Segments as the policy of ``rule`` would have made them; every second one ended with its task."""
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((sum(lengths), OBSERVATION)).astype(np.float32)
    with torch.no_grad():
        mean, log_std = rule.policy(torch.from_numpy(observations))
        actions = mean + log_std.exp() * torch.from_numpy(rng.standard_normal(mean.shape).astype(np.float32))
        logprobs = gaussian_logprobs(actions, mean, log_std)
    return Rollout(
        observations_NO=observations,
        actions_NA=actions.numpy(),
        logprobs_N=logprobs.numpy(),
        rewards_N=(scale * rng.standard_normal(sum(lengths))).astype(np.float32),
        cu_seqlens_S1=np.cumsum([0, *lengths]),
        last_observations_SO=rng.standard_normal((len(lengths), OBSERVATION)).astype(np.float32),
        terminated_S=np.arange(len(lengths)) % 2 == 1,
    )


def value_of(rule: GaussianPPORule, observations: Any) -> Tensor:
    """The value network of ``rule``, from its state."""
    network = ValueNetwork(OBSERVATION, [16])
    names = [f"value.{name}" for name, _ in network.named_parameters()]
    network.load_state_dict({name.removeprefix("value."): rule.state()[name] for name in names})
    with torch.no_grad():
        values: Tensor = network(torch.from_numpy(observations))
    return values


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_resume_is_exact() -> None:
    going, resumed = rule_of(), rule_of()
    going.update(rollout_of(going, 0), update_index=0)
    saved = going.state()
    batch = rollout_of(going, 1)
    expected = going.update(batch, update_index=1)
    resumed.load_state(saved)
    assert_same(resumed.state(), saved)
    torch.manual_seed(99)
    assert resumed.update(batch, update_index=1) == expected
    assert_same(resumed.state(), going.state())


def test_the_first_gradient_is_the_policy_gradient() -> None:
    """At ratio 1; Adam's first moment after one step is a tenth of the gradient, which was not clipped."""
    loose = {"learning_rate": 1e-3, "max_grad_norm": 1e6}
    keys = {"epochs": 1, "minibatches": 1, "lam": 1.0, "gamma": 0.9, "normalise_advantages": False}
    rule = rule_of(**keys, policy=loose, value=loose)
    batch = rollout_of(rule, 0, lengths=(1, 1, 1, 1))
    values, last = value_of(rule, batch.observations_NO), value_of(rule, batch.last_observations_SO)
    returns = torch.from_numpy(batch.rewards_N) + 0.9 * torch.where(torch.from_numpy(batch.terminated_S), 0, last)
    mean, log_std = rule.policy(torch.from_numpy(batch.observations_NO))
    loss = -((returns - values) * gaussian_logprobs(torch.from_numpy(batch.actions_NA), mean, log_std)).mean()
    expected = torch.autograd.grad(loss, list(rule.policy.parameters()))
    report = rule.update(batch, update_index=0)
    for (name, _), gradient in zip(rule.policy.named_parameters(), expected, strict=True):
        moment = rule.state()[f"policy.optimizer.exp_avg.{name}"]
        torch.testing.assert_close(moment, 0.1 * gradient, rtol=1e-4, atol=1e-7)
    assert report["policy/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert report["critic/return"] == pytest.approx(float(returns.mean()), rel=1e-5)
    assert report["loss/value"] == pytest.approx(float((returns - values).square().mean() / 2), rel=1e-5)


def test_what_was_cut_off_bootstraps_and_what_ended_does_not() -> None:
    """Two equal segments but for their end: only the value of the last observation tells their returns apart."""
    returns = {}
    for terminated in (False, True):
        rule = rule_of(minibatches=1, lam=1.0, gamma=0.5)
        batch = rollout_of(rule, 3, lengths=(2,))
        ended = Rollout(
            **{name: getattr(batch, name) for name in batch.__slots__} | {"terminated_S": np.array([terminated])}
        )
        last = float(value_of(rule, batch.last_observations_SO)[0])
        returns[terminated] = rule.update(ended, update_index=0)["critic/return"]
    rewards = batch.rewards_N.astype(float)
    assert returns[True] == pytest.approx((rewards[0] + 1.5 * rewards[1]) / 2, rel=1e-5)
    assert returns[False] - returns[True] == pytest.approx((0.25 + 0.5) * last / 2, rel=1e-4)


def test_advantages_are_normalised_over_the_whole_batch() -> None:
    """Rewards a hundred times as large and shifted teach the policy the same, for a value network that says 0."""
    states = []
    for scale, shift in ((1.0, 0.0), (100.0, 50.0)):
        rule = rule_of(gamma=0.0)
        zeroed = {n: torch.zeros_like(t) if n.startswith("value.layers.2") else t for n, t in rule.state().items()}
        rule.load_state(zeroed)
        batch = rollout_of(rule, 0, scale=scale)
        columns = {name: getattr(batch, name) for name in batch.__slots__} | {"rewards_N": batch.rewards_N + shift}
        rule.update(Rollout(**columns), update_index=0)
        states.append({name: tensor for name, tensor in rule.state().items() if name.startswith("policy.")})
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-5)


def test_steps_and_early_stop() -> None:
    rule = rule_of()
    report = rule.update(rollout_of(rule, 0), update_index=0)
    assert (report["policy/steps"], report["value/steps"], report["policy/epochs"]) == (6, 6, 2)
    fast = rule_of(max_kl=1e-3, epochs=50, policy={"learning_rate": 0.05})
    report = fast.update(rollout_of(fast, 0), update_index=0)
    assert report["policy/approx_kl"] > 1e-3
    assert report["policy/epochs"] < 50


def test_value_clip_bounds_a_step() -> None:
    """Returns far away: a value that has moved by the clip has no gradient left, so repeated epochs stop moving it."""
    moved = {}
    for clip in (None, 0.05):
        keys = {"learning_rate": 1e-2, "max_grad_norm": 1e6}
        rule = rule_of(value_clip=clip, epochs=20, minibatches=1, value=keys)
        batch = rollout_of(rule, 0, scale=100.0)
        before = value_of(rule, batch.observations_NO)
        rule.update(batch, update_index=0)
        moved[clip] = float((value_of(rule, batch.observations_NO) - before).abs().max())
    assert moved[0.05] < moved[None] / 2


def test_steps_that_are_not_finite() -> None:
    """Rewards whose square is no float32 leave the policy's advantages finite, but not the value network's loss."""
    pausing, skipping = rule_of(), rule_of(on_nonfinite="skip")
    batch = rollout_of(pausing, 0, scale=1e30)
    with pytest.raises(NonFiniteStep, match="the loss of the value is inf") as found:
        pausing.update(batch, update_index=0)
    assert found.value.changed, "the policy had made a step"
    report = skipping.update(batch, update_index=0)
    assert (report["optimizer/skipped_steps"], report["value/steps"], report["policy/steps"]) == (6, 0, 6)
    assert all(tensor.isfinite().all() for tensor in skipping.state().values())


def test_what_does_not_fit_is_refused() -> None:
    rule = rule_of()
    with pytest.raises(ProtocolError, match="2 transitions cannot be cut into 3 minibatches"):
        rule.update(rollout_of(rule, 0, lengths=(2,)), update_index=0)
    batch = rollout_of(rule, 0)
    wrong = {name: getattr(batch, name) for name in batch.__slots__} | {"actions_NA": batch.actions_NA[:, :1]}
    with pytest.raises(ProtocolError, match=r"shapes \[3\] and \[1\]; the policy takes \[3\] and gives \[2\]"):
        rule.update(Rollout(**wrong), update_index=0)
    with pytest.raises(CheckpointError, match="PPO does not fit the model"):
        rule.load_state(rule_of(width=8).state())
