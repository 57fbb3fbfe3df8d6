"""The number of ranks changes nothing but rounding: both rules of continuous control over gloo.

The ranks add the same terms in another order; Adam with eps 1e-3 passes on at most lr / eps = 1 times an absolute error
of a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.trainer.collective import Alone, Collective
from penstock.services.trainer.process_group import World
from penstock.services.trainer.transitions import Rollout, Transitions
from penstock.services.trainer.update_rules.gaussian_ppo import GaussianPPORule
from penstock.services.trainer.update_rules.soft_actor_critic import SoftActorCriticRule
from penstock.shared.config.embodied import EpisodePPOConfig, PolicyConfig, SoftActorCriticConfig

LENGTH, UPDATES, ATOL = 25, 3, 2e-6
OPTIMIZER = {"learning_rate": 1e-3, "eps": 1e-3, "max_grad_norm": 0.5}
SQUASHED = PolicyConfig(type="squashed", hidden_sizes=(16,))
Run = tuple[dict[str, float], dict[str, NDArray[Any]]]
"""Metrics of the last update, and the state."""


def soft_actor_critic(collective: Collective, columns: dict[str, NDArray[np.float32]]) -> Run:
    optimizers = dict.fromkeys(("actor", "critic", "temperature"), OPTIMIZER)
    data = {
        "critic_hidden_sizes": [16],
        "batch_size": 33,
        "warmup_transitions": 1,
        "buffer": {"capacity": 50},
        **optimizers,
    }
    config = SoftActorCriticConfig.parse(data)
    rule = SoftActorCriticRule(config, SQUASHED, observation_size=3, action_size=2, seed=1, collective=collective)
    rule.buffer.insert(
        Transitions(
            episodes_N=np.zeros(LENGTH, np.int64),
            steps_N=np.arange(LENGTH),
            observations_NO=columns["observations"],
            actions_NA=np.tanh(columns["actions"]),
            rewards_N=columns["rewards"],
            next_observations_NO=columns["observations"] + 0.1,
            terminated_N=np.zeros(LENGTH, np.bool_),
            truncated_N=np.zeros(LENGTH, np.bool_),
        )
    )
    reports = [rule.update(update_index=index) for index in range(UPDATES)]
    return reports[-1], {name: tensor.numpy() for name, tensor in rule.state().items()}


def gaussian_ppo(collective: Collective, columns: dict[str, NDArray[np.float32]]) -> Run:
    data = {"value_hidden_sizes": [16], "epochs": 2, "minibatches": 3, "policy": OPTIMIZER, "value": OPTIMIZER}
    config = EpisodePPOConfig.parse(data)
    rule = GaussianPPORule(
        config, PolicyConfig(hidden_sizes=(16,)), observation_size=3, action_size=2, seed=1, collective=collective
    )
    rollout = Rollout(
        observations_NO=columns["observations"],
        actions_NA=columns["actions"],
        logprobs_N=-np.abs(columns["rewards"]) - 2,
        rewards_N=columns["rewards"],
        cu_seqlens_S1=np.array([0, 10, LENGTH]),
        last_observations_SO=columns["observations"][:2],
        terminated_S=np.array([True, False]),
    )
    reports = [rule.update(rollout, update_index=index) for index in range(UPDATES)]
    return reports[-1], {name: tensor.numpy() for name, tensor in rule.state().items()}


def train_both(world: World, columns: dict[str, NDArray[np.float32]]) -> list[Run]:
    return [soft_actor_critic(world.everybody, columns), gaussian_ppo(world.everybody, columns)]


@pytest.mark.slow
def test_ranks_agree(ranks: Any) -> None:
    """Batches that do not divide by the number of ranks."""
    rng = np.random.default_rng(0)
    shapes = {"observations": (LENGTH, 3), "actions": (LENGTH, 2), "rewards": (LENGTH,)}
    columns = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    alone = [soft_actor_critic(Alone(), columns), gaussian_ppo(Alone(), columns)]
    first, second = ranks.run(2, train_both, columns)
    for (metrics, state), (expected, own), (_, other) in zip(first, alone, second, strict=True):
        assert metrics.keys() == expected.keys()
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for name, array in own.items():
            assert np.array_equal(state[name], other[name]), f"{name}: ranks are equal to the bit"
            np.testing.assert_allclose(state[name], array, atol=ATOL, rtol=1e-5, err_msg=name)
