"""Adapter of counters, which one object counts together; with the option ``apart`` each has an object of its own.

The episode ends when the count has gone four from its start, or after ``horizon`` steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Counter", "Counters", "make", "make_batch"]

DOWN, UP, RAISE, NOT_A_NUMBER = range(4)
UNSTARTABLE = 666
"""The state id at which a reset raises."""
FAR = 4


class Counters:
    """Observations ``count`` (float64 [1]) and ``steps`` (int32 [2], the number of steps and the state id)."""

    task = "count"

    def __init__(self, num_envs: int, horizon: int) -> None:
        self._horizon = horizon
        self._starts, self._counts = np.zeros(num_envs), np.zeros(num_envs)
        self._steps, self._state_ids = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int64)
        self.spec = {
            "observations": {"count": ((1,), "float64"), "steps": ((2,), "int32")},
            "action": ((), "int64"),
            "num_actions": 4,
            "low": [],
            "high": [],
            "max_episode_steps": horizon,
            "has_success": True,
            "versions": {},
            "snapshots": True,
        }

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Begin episodes."""
        if UNSTARTABLE in state_ids:
            raise RuntimeError("no counter begins there")
        self._starts[env_ids] = [np.random.default_rng(state_id).uniform() for state_id in state_ids.tolist()]
        self._counts[env_ids], self._steps[env_ids], self._state_ids[env_ids] = self._starts[env_ids], 0, state_ids
        return self._observe(env_ids)

    def step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any]
    ) -> tuple[dict[str, NDArray[Any]], Any, Any, Any, Any]:
        """Count up or down, or fail as the action demands."""
        if (actions == RAISE).any():
            raise RuntimeError("a counter broke")
        self._counts[env_ids] += np.where(actions == UP, 1.0, -1.0)
        self._counts[env_ids[actions == NOT_A_NUMBER]] = np.nan
        self._steps[env_ids] += 1
        gone = self._counts[env_ids] - self._starts[env_ids]
        over = np.abs(gone) >= FAR
        cut = ~over & (self._steps[env_ids] >= self._horizon)
        return self._observe(env_ids), gone, over, cut, gone >= FAR - 1

    def states(self, env_ids: NDArray[np.int32]) -> list[bytes]:
        """Return start, count and number of steps."""
        columns = (self._starts, self._counts, self._steps, self._state_ids)
        return [b"".join(column[env].tobytes() for column in columns) for env in env_ids.tolist()]

    def snapshot(self, env_id: int) -> dict[str, Any]:
        """Return start, count, number of steps and state id."""
        columns = (self._starts, self._counts, self._steps, self._state_ids)
        return {"row": [column[env_id] for column in columns]}

    def restore(self, env_id: int, values: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        columns = (self._starts, self._counts, self._steps, self._state_ids)
        for column, value in zip(columns, values["row"], strict=True):
            column[env_id] = value

    def close(self) -> None:
        """Hold nothing that must be freed."""

    def _observe(self, env_ids: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        steps = np.stack([self._steps[env_ids], self._state_ids[env_ids].astype(np.int32)], axis=1)
        return {"count": self._counts[env_ids, None], "steps": steps}


class Counter:
    """One counter."""

    task = "count"

    def __init__(self, horizon: int) -> None:
        self._inner = Counters(1, horizon)
        self._me = np.zeros(1, np.int32)
        self.spec = self._inner.spec

    def reset(self, state_id: int) -> dict[str, NDArray[Any]]:
        """Begin the episode of ``state_id``."""
        return _first(self._inner.reset(self._me, np.asarray([state_id])))

    def step(self, action: Any) -> tuple[dict[str, NDArray[Any]], float, bool, bool, bool]:
        """Execute one action."""
        seen, *columns = self._inner.step(self._me, np.asarray([action]))
        reward, over, cut, success = (column[0] for column in columns)
        return _first(seen), float(reward), bool(over), bool(cut), bool(success)

    def state(self) -> bytes:
        """Return everything that decides the rest of the episode."""
        return self._inner.states(self._me)[0]

    def snapshot(self) -> dict[str, Any]:
        """Return what a restore needs."""
        return self._inner.snapshot(0)

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self._inner.restore(0, values)

    def close(self) -> None:
        """Hold nothing that must be freed."""


def _first(seen: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: rows[0] for name, rows in seen.items()}


def make(env_id: str, options: dict[str, Any]) -> Counter:
    """Create one counter."""
    return Counter(options["horizon"])


def make_batch(env_id: str, options: dict[str, Any], num_envs: int) -> Counters | None:
    """Create all counters, or return None if they are to be apart."""
    return None if options["apart"] else Counters(num_envs, options["horizon"])
