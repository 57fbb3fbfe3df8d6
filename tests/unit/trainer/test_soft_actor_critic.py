"""Soft actor-critic: exact resume, closed forms of one step, the target of the temperature, warm-up, refusals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.batch.episodes import EpisodeColumns
from penstock.services.trainer.batch.replay_buffer import sampled_rows
from penstock.services.trainer.ranks.collective import Alone
from penstock.services.trainer.update_rules import NonFiniteStep
from penstock.services.trainer.update_rules.soft_actor_critic import SoftActorCriticRule
from penstock.shared.config.embodied import PolicyConfig, SoftActorCriticConfig
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models.distributions import squashed_sample
from penstock.shared.models.episode_policy import SquashedPolicy, build_policy
from penstock.shared.protocol.embodied.environment import ArraySpec
from penstock.shared.protocol.ids import Draw
from tests.unit.trainer.episode_batches import spec_of

OBSERVATION, ACTION, SEED = 3, 2, 4


def policy_of(*, width: int = 16, chunk: int = 1, normalise: bool = False) -> SquashedPolicy:
    keys = {"type": "squashed", "hidden_sizes": [width, width], "normalise_observations": normalise}
    spec = spec_of(observations={"state": ArraySpec((OBSERVATION,), "float32")})
    policy = build_policy(PolicyConfig.parse(keys), spec, action_chunk=chunk, seed=3)
    assert isinstance(policy, SquashedPolicy)
    return policy


def rule_of(
    policy: SquashedPolicy | None = None, /, *, width: int = 16, on_nonfinite: Literal["pause", "skip"] = "pause",
    **keys: Any,
) -> SoftActorCriticRule:  # fmt: skip
    data: dict[str, Any] = {
        "critic_hidden_sizes": [width, width], "batch_size": 32, "warmup_transitions": 20, "buffer": {"capacity": 64},
        **{name: {"learning_rate": 1e-2, "max_grad_norm": 10.0} for name in ("actor", "critic", "temperature")},
    }  # fmt: skip
    config = SoftActorCriticConfig.parse(data | keys)
    return SoftActorCriticRule(
        config, policy or policy_of(width=width), seed=SEED, collective=Alone(), on_nonfinite=on_nonfinite
    )


def episode(
    number: int, *, length: int = 20, scale: float = 1.0, terminated: bool = False, chunk: int = 1, count: int = 1
) -> EpisodeColumns:
    """Return ``count`` episodes of random steps as one group; their rewards punish large actions."""
    rng = np.random.default_rng(number)
    total = length * count
    observations = rng.standard_normal((total, OBSERVATION)).astype(np.float32)
    actions = rng.uniform(-1, 1, (total, chunk, ACTION)).astype(np.float32)
    return EpisodeColumns(
        observations={"state": observations},
        final_observations={"state": rng.standard_normal((count, OBSERVATION)).astype(np.float32)},
        actions_NCA=np.arctanh(actions), logprobs_NCA=np.zeros((total, chunk, ACTION), np.float32),
        executed_NC=np.ones((total, chunk), np.bool_), rewards_N=-scale * np.square(actions).sum((1, 2)),
        cu_seqlens_E1=length * np.arange(count + 1), terminated_E=np.full(count, terminated),
        truncated_E=np.full(count, not terminated), returns_E=np.zeros(count, np.float32),
        succeeded_E=np.zeros(count, np.bool_), group_E=np.zeros(count, np.int64), draws=(Draw(number),), num_failed=0,
    )  # fmt: skip


def weights(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    names = [name for name in state if name.startswith(prefix) and ".optimizer." not in name]
    assert names
    return {name.removeprefix(prefix): state[name] for name in names}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_resume_is_exact() -> None:
    """After an interruption between two updates, with a full buffer, metrics and state are the same."""

    def go_on(rule: SoftActorCriticRule, updates: range) -> list[dict[str, float]]:
        return [rule.update(episode(index), update_index=index) for index in updates]

    first, second = policy_of(), policy_of()
    going, resumed = rule_of(first, steps_per_update=2), rule_of(second, steps_per_update=2)
    go_on(going, range(5))
    saved, actor = going.state(), {name: tensor.clone() for name, tensor in first.state_dict().items()}
    expected = go_on(going, range(5, 8))
    resumed.load_state(saved)
    second.load_state_dict(actor)
    assert_same(resumed.state(), saved)
    torch.manual_seed(99)
    assert go_on(resumed, range(5, 8)) == expected
    assert_same(resumed.state(), going.state())
    assert_same(second.state_dict(), first.state_dict())


def test_target_critics_follow_the_critics() -> None:
    rule = rule_of(tau=0.25)
    before = weights(rule.state(), "target.")
    assert_same(before, weights(rule.state(), "critic."))
    rule.update(episode(0), update_index=0)
    after, critics = weights(rule.state(), "target."), weights(rule.state(), "critic.")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], 0.75 * tensor + 0.25 * critics[name])
        assert not torch.equal(after[name], tensor)


@pytest.mark.parametrize("chunk", [1, 3])
def test_targets_of_one_step_are_the_closed_form(chunk: int) -> None:
    """Truncated steps bootstrap: targets are ``r + gamma (min_c Q_target - alpha log pi)`` of the first networks."""
    rule, policy = rule_of(policy_of(chunk=chunk), gamma=0.9, initial_temperature=0.5), policy_of(chunk=chunk)
    given = episode(0, chunk=chunk)
    first = rule_of(policy_of(chunk=chunk))
    rows = sampled_rows(SEED, 0, stored=20, size=32)
    noise = np.random.default_rng([SEED, 0, 1]).standard_normal((2, 32, chunk, ACTION), np.float32)
    following = torch.from_numpy(np.concatenate([given.observations["state"][1:], given.final_observations["state"]]))
    with torch.no_grad():
        mean, log_std = policy._parameters_of(following[rows])
        actions, logprobs = squashed_sample(mean, log_std, torch.from_numpy(noise[1]))
        soft = first._targets(following[rows], actions.flatten(1)).amin(0) - 0.5 * logprobs.sum((1, 2))
    expected = torch.from_numpy(given.rewards_N[rows]) + 0.9 * soft
    report = rule.update(given, update_index=0)
    assert report["critic/target"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert report["policy/target_entropy"] == -chunk * ACTION


def test_a_step_that_ends_the_task_has_no_future() -> None:
    rule = rule_of(gamma=0.9, initial_temperature=0.5)
    report = rule.update(episode(0, length=1, count=30, terminated=True), update_index=0)
    rewards = rule.buffer.sample(0, 32)["rewards"]
    assert report["critic/target"] == pytest.approx(float(rewards.mean()), rel=1e-5)


def test_the_last_step_of_an_episode_is_followed_by_its_final_observation() -> None:
    rule, given = rule_of(), episode(0, length=4, count=5, terminated=True)
    rule.update(given, update_index=0)
    kept = rule.buffer.state()
    assert torch.equal(kept["observations"][1:4], kept["next_observations"][:3])
    np.testing.assert_array_equal(kept["next_observations"][3::4], given.final_observations["state"])
    assert kept["terminated"].tolist() == 5 * [False, False, False, True]
    np.testing.assert_allclose(kept["actions"], np.tanh(given.actions_NCA[:, 0]), atol=1e-6)


@pytest.mark.parametrize(("target", "sign"), [(5.0, 1), (-20.0, -1)])
def test_the_temperature_moves_with_the_lack_of_entropy(target: float, sign: int) -> None:
    rule = rule_of(target_entropy=target)
    reports = [rule.update(episode(0), update_index=index) for index in range(3)]
    temperatures = [1.0] + [report["policy/temperature"] for report in reports]
    assert all(sign * (later - sooner) > 0 for sooner, later in itertools.pairwise(temperatures))


@pytest.mark.long
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
    given = episode(0, length=1, count=500, scale=c, terminated=True)
    reports = [rule.update(given, update_index=index) for index in range(250)]
    assert reports[0]["policy/entropy"] < target - 0.3
    assert np.mean([report["policy/entropy"] for report in reports[-50:]]) == pytest.approx(target, abs=0.2)
    expected = 2 * c * math.exp(target) / (2 * math.pi * math.e)
    assert reports[-1]["policy/temperature"] == pytest.approx(expected, rel=0.3)


def test_a_critic_loss_that_is_not_finite_ends_the_update_or_is_skipped() -> None:
    """Squares of the rewards overflow float32: the update fails and changes no network, or skips the critics' step."""
    first, second = policy_of(), policy_of()
    pausing, skipping = rule_of(first), rule_of(second, on_nonfinite="skip")
    given = episode(0, scale=1e30)
    before = weights(pausing.state(), "critic."), {name: tensor.clone() for name, tensor in first.state_dict().items()}
    for _ in range(2):  # a batch that is tried again
        with pytest.raises(NonFiniteStep, match="the loss of the critic is inf") as found:
            pausing.update(given, update_index=0)
        assert not found.value.changed
        assert pausing.buffer.inserted == 20
    assert_same(weights(pausing.state(), "critic."), before[0])
    assert_same(first.state_dict(), before[1])
    report = skipping.update(given, update_index=0)
    assert (report["optimizer/skipped_steps"], report["critic/steps"], report["actor/steps"]) == (1, 0, 1)
    assert_same(weights(skipping.state(), "critic."), before[0])
    report = skipping.update(episode(1, count=4), update_index=1)
    assert report["optimizer/skipped_steps"] == 0, "nothing is left of that step's gradient"
    assert report["critic/grad_norm"] < 1e3


def test_a_step_that_is_not_finite_leaves_its_batch_in_the_buffer_and_nothing_else() -> None:
    """A trainer that loads the state from before the batch ends as if the batch had never arrived."""
    rule, plain = rule_of(), rule_of(on_nonfinite="skip")
    for each in (rule, plain):
        each.update(episode(0), update_index=0)
    before, bad = rule.state(), episode(1, scale=1e30)
    with pytest.raises(NonFiniteStep):
        rule.update(bad, update_index=1)
    left = rule.state()
    changed = {name for name in before if not torch.equal(before[name], left[name])}
    assert changed == {name for name in before if name.startswith("buffer.")}
    plain.update(bad, update_index=1)
    held = {name: tensor for name, tensor in plain.state().items() if name.startswith("buffer.")}
    assert_same({name: left[name] for name in held}, held)
    rule.load_state(before)
    rule.update(episode(2), update_index=1)
    never = rule_of()
    never.update(episode(0), update_index=0)
    never.update(episode(2), update_index=1)
    assert_same(rule.state(), never.state())


def test_updates_only_fill_the_buffer_until_there_is_enough() -> None:
    policy = policy_of()
    rule = rule_of(policy)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()} | rule.state()
    report = rule.update(episode(0, length=19), update_index=0)
    assert (report["buffer/size"], report["critic/steps"]) == (19, 0)
    assert "loss/actor" not in report
    after = policy.state_dict() | rule.state()
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        f"buffer.{name}" for name in ("observations", "actions", "rewards", "next_observations", "terminated",
                                      "inserted", "groups")
    ]  # fmt: skip
    report = rule.update(episode(1, length=1), update_index=1)
    assert (report["buffer/inserted"], report["critic/steps"], report["actor/steps"]) == (20, 1, 1)
    with pytest.raises(ConfigError, match=r"warmup_transitions 20 never fit into buffer\.capacity 10"):
        rule_of(buffer={"capacity": 10})


def test_a_group_is_inserted_once() -> None:
    rule = rule_of()
    reports = [rule.update(episode(number), update_index=index) for index, number in enumerate((0, 0, 1, 0))]
    assert [report["buffer/fresh"] for report in reports] == [20, 0, 20, 0]
    assert reports[-1]["buffer/inserted"] == 40


def test_observations_are_normalised_when_they_are_drawn() -> None:
    """Shifted and scaled observations, normalised by their own statistics, give the networks the same inputs."""
    reports = []
    for shift, scale in ((0.0, 1.0), (7.0, 3.0)):
        policy = policy_of(normalise=True)
        given = episode(0)
        numbers = {name: scale * column + np.float32(shift) for name, column in given.observations.items()}
        final = {name: scale * column + np.float32(shift) for name, column in given.final_observations.items()}
        policy.observe({name: torch.from_numpy(column) for name, column in numbers.items()})
        rule = rule_of(policy)
        reports.append(rule.update(replace(given, observations=numbers, final_observations=final), update_index=0))
        kept = rule.buffer.state()["observations"]
        np.testing.assert_array_equal(kept, numbers["state"])
    assert reports[1] == pytest.approx(reports[0], rel=1e-4, abs=1e-5)


def test_other_networks_cannot_be_loaded() -> None:
    rule, other = rule_of(), rule_of(width=8)
    for each in (rule, other):
        each.update(episode(0), update_index=0)
    before = rule.state()
    with pytest.raises(CheckpointError, match="soft actor-critic does not fit the model"):
        rule.load_state(other.state())
    damaged = before | {"buffer.rewards": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="'rewards' is float32"):
        rule.load_state({name: tensor + 1 if "critic" in name else tensor for name, tensor in damaged.items()})
    assert_same(rule.state(), before)
