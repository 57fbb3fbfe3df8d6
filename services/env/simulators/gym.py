"""Gymnasium environments, stepped one by one.

Not through ``gymnasium.vector``: a vector environment steps all its members at once, so a member whose episode ended
inside a chunk of actions would have to be stepped on, or reset by a rule of its own.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from penstock.services.env.simulators.base import Transition
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.environment import EnvSpec

__all__ = ["GymSimulator"]


class GymSimulator:
    """B copies of a registered environment with Box observations and Discrete or Box actions."""

    def __init__(self, env_id: str, num_envs: int, options: dict[str, Any]) -> None:
        """Raises ConfigError where the environment does not exist, cannot be made, or has other spaces."""
        self._envs: list[gymnasium.Env[Any, Any]] = []
        try:
            for _ in range(num_envs):
                self._envs.append(gymnasium.make(env_id, disable_env_checker=True, **options))
            self.spec = _make_spec(env_id, self._envs[0], num_envs)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            self.close()
            raise ConfigError(f"environment '{env_id}' cannot be made: {error}") from None
        self._dtype = np.dtype(self.spec.observation_dtype)

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> NDArray[Any]:
        """The state id is the seed of the episode."""
        observations = self._room(len(env_ids))
        for i, (env, state) in enumerate(zip(env_ids.tolist(), state_ids.tolist(), strict=True)):
            observations[i], _ = self._envs[env].reset(seed=state)
        return observations

    def step(self, env_ids: NDArray[np.int32], actions: NDArray[Any]) -> Transition:
        """See the protocol."""
        n = len(env_ids)
        observations, rewards = self._room(n), np.empty(n, np.float32)
        terminated, truncated = np.empty(n, np.bool_), np.empty(n, np.bool_)
        for i, env in enumerate(env_ids.tolist()):
            action = actions[i] if self.spec.num_actions is None else int(actions[i])
            observations[i], rewards[i], terminated[i], truncated[i], _ = self._envs[env].step(action)
        return Transition(observations, rewards, terminated, truncated)

    def close(self) -> None:
        """Close all environments."""
        for env in self._envs:
            env.close()

    def _room(self, n: int) -> NDArray[Any]:
        return np.empty((n, *self.spec.observation_shape), self._dtype)


def _make_spec(env_id: str, env: gymnasium.Env[Any, Any], num_envs: int) -> EnvSpec:
    observation, action = env.observation_space, env.action_space
    if not isinstance(observation, Box):
        raise ConfigError(f"environment '{env_id}': observations are {observation}; only Box is supported")
    if isinstance(action, Discrete) and action.start == 0:
        num_actions, low, high = int(action.n), [], []
    elif isinstance(action, Box):
        num_actions, low, high = None, action.low.ravel().tolist(), action.high.ravel().tolist()
    else:
        raise ConfigError(f"environment '{env_id}': actions are {action}; only Discrete from 0 and Box are supported")
    return EnvSpec(
        env_id=env_id,
        backend="gymnasium",
        num_envs=num_envs,
        observation_shape=tuple(observation.shape),
        observation_dtype=str(observation.dtype),
        action_shape=tuple(action.shape or ()),
        action_dtype=str(action.dtype),
        num_actions=num_actions,
        action_low=low,
        action_high=high,
        max_episode_steps=env.spec.max_episode_steps if env.spec else None,
        versions={"gymnasium": gymnasium.__version__},
    )
