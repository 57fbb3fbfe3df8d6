"""A simulator of your own, whole: a puck on a table, pushed by a force, that must come to rest at a goal.

    penstock sims install puck --adapter examples/own_simulator.py
    penstock submit examples/own-simulator-ppo.yaml --follow

``docs/how-to/simulator.md`` explains each part. The file may import the standard library, NumPy, and what
``--package`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DT_S = 0.05
FRICTION = 0.4
NEAR_M, SLOW_M_S = 0.05, 0.2


class Puck:
    """Observation ``state``: place [2], velocity [2] and goal [2]; the action is the force [2], of at most 1."""

    def __init__(self, horizon: int = 60) -> None:
        self._horizon = horizon
        self.task = "bring the puck to rest at the goal"
        self.spec = {
            "observations": {"state": ([6], "float64")},
            "action": ([2], "float32"),
            "num_actions": None,  # for discrete actions: how many, with "action": ([], "int64") and no bounds
            "low": [-1.0, -1.0],
            "high": [1.0, 1.0],
            "max_episode_steps": horizon,
            "has_success": True,
            "versions": {"puck": "1"},
        }

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin the episode that ``state_id`` names: everything random follows from it, and from nothing else."""
        rng = np.random.default_rng(state_id)
        self._place, self._goal = rng.uniform(-1, 1, 2), rng.uniform(-1, 1, 2)
        self._velocity, self._steps = np.zeros(2), 0
        return self._observe()

    def step(self, action: Any) -> tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]:
        """Execute one action: observations, reward, terminated, truncated, success."""
        force = np.clip(action, -1.0, 1.0)
        self._velocity += DT_S * (4.0 * force - FRICTION * self._velocity)
        self._place += DT_S * self._velocity
        self._steps += 1
        distance = float(np.linalg.norm(self._place - self._goal))
        success = distance < NEAR_M and float(np.linalg.norm(self._velocity)) < SLOW_M_S
        return self._observe(), 1.0 - min(1.0, distance), False, self._steps >= self._horizon, success

    def state(self) -> bytes:
        """All that decides how the episode goes on; groups of episodes are compared by a hash of it."""
        return np.concatenate([self._place, self._velocity, self._goal, [self._steps]]).tobytes()

    def close(self) -> None:
        """Free what the environment holds: windows, servers, memory of a GPU."""

    def _observe(self) -> Mapping[str, NDArray[Any]]:
        return {"state": np.concatenate([self._place, self._velocity, self._goal])}


def make(env_id: str, options: dict[str, Any]) -> Puck:
    """One environment: ``env_id`` is ``environment.task`` of the job file, ``options`` its ``environment.options``."""
    if env_id != "rest-at-goal":
        raise ValueError(f"there is no task '{env_id}', only rest-at-goal")
    return Puck(**options)
