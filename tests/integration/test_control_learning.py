"""Both rules of continuous control learn a task of the env service's pool: a point that has to reach a goal on a line.

The observation is position and goal in [-1, 1]; the action in [-1, 1] moves the point by up to 0.3; a step costs its
distance from the goal and 0.1; within 0.05 of the goal the task is over, after 20 steps the episode is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import open_simulator
from penstock.services.trainer.collective import Alone
from penstock.services.trainer.transitions import Rollout, Transitions
from penstock.services.trainer.update_rules.gaussian_ppo import GaussianPPORule
from penstock.services.trainer.update_rules.soft_actor_critic import SoftActorCriticRule
from penstock.shared.algorithms.gaussian import gaussian_logprobs, squashed_sample
from penstock.shared.config.embodied import EpisodePPOConfig, PolicyConfig, SoftActorCriticConfig
from penstock.shared.models.control import to_bounds
from penstock.shared.protocol.environment import EnvSpec, OpenEnv, ResetRequest, StepReply, StepRequest
from tests.contract.simulated_envs import FOLDER

ENV_ID, NUM_ENVS = "simulated_envs:PointReach-v0", 8
HELD_OUT = 1_000_000
"""Seeds of episodes from here on are not trained on."""

Act = Callable[[Tensor], Tensor]
Floats = NDArray[np.float32]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[EnvPool]:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    simulator = open_simulator(OpenEnv(env_id=ENV_ID, num_envs=NUM_ENVS), Path("/nonexistent"))
    yield EnvPool(simulator)
    simulator.close()


class Driver:
    """Steps all environments of a pool, one action at a time, and remembers where each of them is."""

    def __init__(self, pool: EnvPool, *, first_seed: int) -> None:
        self._pool, self._envs = pool, np.arange(NUM_ENVS, dtype=np.int32)
        seeds = first_seed + np.arange(NUM_ENVS, dtype=np.int64)
        reply = pool.reset(ResetRequest(seq=0, env_ids=self._envs, state_ids=seeds))
        self.observations, self.first_episode = reply.observations["state"].copy(), int(reply.episode_ids[0])
        self.steps_in_episode = np.zeros(NUM_ENVS, np.int64)

    @property
    def spec(self) -> EnvSpec:
        return self._pool._simulator.spec

    def step(self, actions_BA: Tensor) -> tuple[StepReply, Transitions]:
        """Actions in the units of the policy's bounds [-1, 1]."""
        scaled_BA = to_bounds(actions_BA, self.spec.action_low, self.spec.action_high)
        reply = self._pool.step(
            StepRequest(
                seq=0, auto_reset=True, env_ids=self._envs, actions=scaled_BA.numpy()[:, None],
                next_state_ids=np.zeros(0, np.int64),
            )
        )  # fmt: skip
        after = reply.observations["state"].copy()
        after[reply.ended] = reply.final_observations["state"]
        transitions = Transitions(
            episodes_N=reply.episode_ids - self.first_episode, steps_N=self.steps_in_episode.copy(),
            observations_NO=self.observations, actions_NA=actions_BA.numpy(), rewards_N=reply.rewards[:, 0],
            next_observations_NO=after, terminated_N=reply.terminated[:, 0], truncated_N=reply.truncated[:, 0],
        )  # fmt: skip
        self.observations = reply.observations["state"].copy()
        self.steps_in_episode = np.where(reply.ended, 0, self.steps_in_episode + 1)
        return reply, transitions


def success(pool: EnvPool, act: Act) -> float:
    """Share of held-out episodes that reach the goal; each environment counts until its fourth."""
    driver = Driver(pool, first_seed=HELD_OUT)
    reached, ended = 0, np.zeros(NUM_ENVS, np.int64)
    while (ended < 4).any():
        with torch.no_grad():
            reply, _ = driver.step(act(torch.from_numpy(driver.observations)))
        reached += int((reply.terminated[:, 0] & (ended < 4)).sum())
        ended += reply.ended
    return reached / (4 * NUM_ENVS)


SQUASHED = PolicyConfig(type="squashed", hidden_sizes=(32, 32))
GAUSSIAN = PolicyConfig(hidden_sizes=(32, 32), initial_log_std=-0.5)


@pytest.mark.long
def test_soft_actor_critic_learns(pool: EnvPool) -> None:
    optimizer = {"learning_rate": 3e-3, "max_grad_norm": 10.0}
    config = SoftActorCriticConfig.parse(
        {
            "critic_hidden_sizes": [32, 32], "gamma": 0.9, "tau": 0.02, "batch_size": 64, "steps_per_update": 3,
            "warmup_transitions": 200, "initial_temperature": 0.1, "buffer": {"capacity": 4000},
            "actor": optimizer, "critic": optimizer, "temperature": optimizer,
        }
    )  # fmt: skip
    rule = SoftActorCriticRule(config, SQUASHED, observation_size=2, action_size=1, seed=1, collective=Alone())

    def greedy(observations_BO: Tensor) -> Tensor:
        return torch.tanh(rule.actor(observations_BO)[0])

    untrained = success(pool, greedy)
    noise = torch.Generator().manual_seed(1)
    driver, update = Driver(pool, first_seed=0), 0
    for _ in range(250):
        with torch.no_grad():
            mean_BA, log_std_BA = rule.actor(torch.from_numpy(driver.observations))
            actions_BA, _ = squashed_sample(mean_BA, log_std_BA, torch.randn(mean_BA.shape, generator=noise))
        rule.buffer.insert(driver.step(actions_BA)[1])
        if rule.ready:
            rule.update(update_index=update)
            update += 1
    assert rule.buffer.inserted == 2000
    assert untrained < 0.5
    assert success(pool, greedy) >= 0.85


@pytest.mark.long
def test_gaussian_ppo_learns(pool: EnvPool) -> None:
    optimizer = {"learning_rate": 3e-3, "eps": 1e-5, "max_grad_norm": 0.5}
    config = EpisodePPOConfig.parse(
        {
            "value_hidden_sizes": [32, 32], "gamma": 0.9, "epochs": 6, "minibatches": 4,
            "policy": optimizer, "value": optimizer,
        }
    )  # fmt: skip
    rule = GaussianPPORule(config, GAUSSIAN, observation_size=2, action_size=1, seed=1, collective=Alone())

    def greedy(observations_BO: Tensor) -> Tensor:
        return rule.policy(observations_BO)[0].clamp(-1, 1)

    untrained = success(pool, greedy)
    noise = torch.Generator().manual_seed(1)
    driver = Driver(pool, first_seed=0)
    for index in range(20):
        rule.update(rollout(driver, rule, noise, num_steps=32), update_index=index)
    assert untrained < 0.5
    assert success(pool, greedy) >= 0.85


def rollout(driver: Driver, rule: GaussianPPORule, noise: torch.Generator, *, num_steps: int) -> Rollout:
    """``num_steps`` of every environment, cut where episodes end; environments stand one after the other."""
    parts: list[Transitions] = []
    logprobs: list[Floats] = []
    for _ in range(num_steps):
        with torch.no_grad():
            mean_BA, log_std_BA = rule.policy(torch.from_numpy(driver.observations))
            actions_BA = mean_BA + log_std_BA.exp() * torch.randn(mean_BA.shape, generator=noise)
            logprobs.append(gaussian_logprobs(actions_BA, mean_BA, log_std_BA).numpy())
        parts.append(driver.step(actions_BA)[1])

    def column(name: str) -> NDArray[Any]:
        """Of all environments, each with its steps in order."""
        return np.concatenate(np.stack([getattr(part, name) for part in parts], axis=1))

    terminated = column("terminated_N")
    last = terminated | column("truncated_N")
    last[num_steps - 1 :: num_steps] = True
    return Rollout(
        observations_NO=column("observations_NO"),
        actions_NA=column("actions_NA"),
        logprobs_N=np.concatenate(np.stack(logprobs, axis=1)),
        rewards_N=column("rewards_N"),
        cu_seqlens_S1=np.concatenate([[0], np.flatnonzero(last) + 1]),
        last_observations_SO=column("next_observations_NO")[last],
        terminated_S=terminated[last],
    )
