"""Soft actor-critic: exact resume, closed forms of one step, the temperature's aim, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.collective import Alone
from penstock.services.trainer.replay_buffer import sampled_rows
from penstock.services.trainer.transitions import Transitions
from penstock.services.trainer.update_rules import NonFiniteStep
from penstock.services.trainer.update_rules.soft_actor_critic import SoftActorCriticRule
from penstock.shared.algorithms.gaussian import squashed_sample
from penstock.shared.config.embodied import PolicyConfig, SoftActorCriticConfig
from penstock.shared.errors import CheckpointError, ConfigError, Conflict

OBSERVATION, ACTION, SEED = 3, 2, 4


def rule_of(*, width: int = 16, on_nonfinite: Literal["pause", "skip"] = "pause", **keys: Any) -> SoftActorCriticRule:
    data: dict[str, Any] = {
        "critic_hidden_sizes": [width, width], "batch_size": 32, "warmup_transitions": 20, "buffer": {"capacity": 64},
        **{name: {"learning_rate": 1e-2, "max_grad_norm": 10.0} for name in ("actor", "critic", "temperature")},
    }  # fmt: skip
    config = SoftActorCriticConfig.parse(data | keys)
    policy = PolicyConfig(type="squashed", hidden_sizes=(width, width))
    return SoftActorCriticRule(
        config, policy, observation_size=OBSERVATION, action_size=ACTION, seed=SEED, collective=Alone(),
        on_nonfinite=on_nonfinite,
    )  # fmt: skip


def episode(number: int, *, length: int = 20, scale: float = 1.0, terminated: bool = False) -> Transitions:
    """An episode of random steps; its rewards punish large actions."""
    rng = np.random.default_rng(number)
    observations = rng.standard_normal((length + 1, OBSERVATION)).astype(np.float32)
    actions = rng.uniform(-1, 1, (length, ACTION)).astype(np.float32)
    last = np.arange(length) == length - 1
    return Transitions(
        episodes_N=np.full(length, number),
        steps_N=np.arange(length),
        observations_NO=observations[:-1],
        actions_NA=actions,
        rewards_N=-scale * np.square(actions).sum(1),
        next_observations_NO=observations[1:],
        terminated_N=np.full(length, terminated) & last,
        truncated_N=np.full(length, not terminated) & last,
    )


def weights(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    names = [name for name in state if name.startswith(prefix) and ".optimizer." not in name]
    assert names
    return {name.removeprefix(prefix): state[name] for name in names}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_resume_is_exact() -> None:
    """Interrupted between two updates, with the buffer come round: the same metrics and the same bytes."""

    def go_on(rule: SoftActorCriticRule, updates: range) -> list[dict[str, float]]:
        reports = []
        for index in updates:
            rule.buffer.insert(episode(index))
            reports.append(rule.update(update_index=index))
        return reports

    going, resumed = rule_of(steps_per_update=2), rule_of(steps_per_update=2)
    go_on(going, range(5))
    saved = going.state()
    expected = go_on(going, range(5, 8))
    resumed.load_state(saved)
    assert_same(resumed.state(), saved)
    torch.manual_seed(99)
    assert go_on(resumed, range(5, 8)) == expected
    assert_same(resumed.state(), going.state())


def test_target_critics_follow_the_critics() -> None:
    rule = rule_of(tau=0.25)
    rule.buffer.insert(episode(0))
    before = weights(rule.state(), "target.")
    assert_same(before, weights(rule.state(), "critic."))
    rule.update(update_index=0)
    after, critics = weights(rule.state(), "target."), weights(rule.state(), "critic.")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], 0.75 * tensor + 0.25 * critics[name])
        assert not torch.equal(after[name], tensor)


def test_targets_of_one_step_are_the_closed_form() -> None:
    """Truncated steps bootstrap: ``r + gamma (min_c Q_target - alpha log pi)`` of the first networks."""
    rule = rule_of(gamma=0.9, initial_temperature=0.5)
    given = episode(0)
    rule.buffer.insert(given)
    first = rule_of()
    rows = sampled_rows(SEED, 0, stored=20, size=32)
    noise = np.random.default_rng([SEED, 0, 1]).standard_normal((2, 32, ACTION), np.float32)
    following = torch.from_numpy(given.next_observations_NO[rows])
    with torch.no_grad():
        actions, logprobs = squashed_sample(*first.actor(following), torch.from_numpy(noise[1]))
        soft = first._targets(following, actions).amin(0) - 0.5 * logprobs
    expected = torch.from_numpy(given.rewards_N[rows]) + 0.9 * soft
    assert rule.update(update_index=0)["critic/target"] == pytest.approx(float(expected.mean()), rel=1e-5)


def test_a_step_that_ends_the_task_has_no_future() -> None:
    rule = rule_of(gamma=0.9, initial_temperature=0.5)
    for number in range(30):
        rule.buffer.insert(episode(number, length=1, terminated=True))
    rewards = rule.buffer.sample(0, 32)["rewards"]
    assert rule.update(update_index=0)["critic/target"] == pytest.approx(float(rewards.mean()), rel=1e-5)


@pytest.mark.parametrize(("target", "sign"), [(5.0, 1), (-20.0, -1)])
def test_the_temperature_moves_with_the_lack_of_entropy(target: float, sign: int) -> None:
    rule = rule_of(target_entropy=target)
    rule.buffer.insert(episode(0))
    temperatures = [1.0] + [rule.update(update_index=index)["policy/temperature"] for index in range(3)]
    assert all(sign * (later - sooner) > 0 for sooner, later in itertools.pairwise(temperatures))


@pytest.mark.parametrize("target", [0.0, 0.5])
def test_the_entropy_comes_to_its_target(target: float) -> None:
    """Episodes of one step with reward ``-c |a|²``: the best policy is Gaussian with variance ``alpha / 2c``.

    Its entropy in two dimensions, ``log(2 pi e alpha / 2c)``, says at which temperature the search has to end.
    """
    c = 4.0
    fast = {"learning_rate": 2e-2, "max_grad_norm": 10.0}
    rule = rule_of(
        target_entropy=target, buffer={"capacity": 500}, tau=0.2, batch_size=64, temperature=fast, critic=fast
    )
    for number in range(500):
        rule.buffer.insert(episode(number, length=1, scale=c, terminated=True))
    reports = [rule.update(update_index=index) for index in range(250)]
    assert reports[0]["policy/entropy"] < -1
    assert np.mean([report["policy/entropy"] for report in reports[-50:]]) == pytest.approx(target, abs=0.2)
    expected = 2 * c * math.exp(target) / (2 * math.pi * math.e)
    assert reports[-1]["policy/temperature"] == pytest.approx(expected, rel=0.3)


def test_steps_that_are_not_finite() -> None:
    """Rewards whose square is no float32: the update ends and changes nothing, or leaves the critics' step out."""
    pausing, skipping = rule_of(), rule_of(on_nonfinite="skip")
    for rule in (pausing, skipping):
        rule.buffer.insert(episode(0, scale=1e30))
    before = pausing.state()
    with pytest.raises(NonFiniteStep, match="the loss of the critic is inf") as found:
        pausing.update(update_index=0)
    assert not found.value.changed
    assert_same(pausing.state(), before)
    report = skipping.update(update_index=0)
    assert (report["optimizer/skipped_steps"], report["critic/steps"], report["actor/steps"]) == (1, 0, 1)
    assert_same(weights(skipping.state(), "critic."), weights(before, "critic."))
    for number in range(1, 5):
        skipping.buffer.insert(episode(number))
    report = skipping.update(update_index=1)
    assert report["optimizer/skipped_steps"] == 0, "nothing is left of that step's gradient"
    assert report["critic/grad_norm"] < 1e3


def test_no_update_before_there_is_enough() -> None:
    rule = rule_of()
    rule.buffer.insert(episode(0, length=19))
    with pytest.raises(Conflict, match="has got 19 of 20 transitions"):
        rule.update(update_index=0)
    assert not rule.ready
    rule.buffer.insert(episode(1, length=1))
    assert rule.ready
    with pytest.raises(ConfigError, match=r"warmup_transitions 20 never fit into buffer\.capacity 10"):
        rule_of(buffer={"capacity": 10})


def test_other_networks_cannot_be_loaded() -> None:
    rule, other = rule_of(), rule_of(width=8)
    for each in (rule, other):
        each.buffer.insert(episode(0))
    before = rule.state()
    with pytest.raises(CheckpointError, match="soft actor-critic does not fit the model"):
        rule.load_state(other.state())
    damaged = before | {"buffer.rewards": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="'rewards' is float32"):
        rule.load_state({name: tensor + 1 if "actor" in name else tensor for name, tensor in damaged.items()})
    assert_same(rule.state(), before)
