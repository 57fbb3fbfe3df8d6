"""Adapter of a simulator with two cameras of different sizes and a vector, as arms with a camera at the wrist have.

Each image is noise of the episode's seed, shifted by what the arm did: ``front`` by the steps, ``wrist`` by its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TwoCameras", "make"]

FRONT, WRIST = (12, 16, 3), (6, 8, 1)
NEAR = 0.3


class TwoCameras:
    """Observations ``front``, ``wrist`` and ``state`` (place and goal on a line, float32 [2]); the action is a push."""

    task = "go to the goal"

    def __init__(self, horizon: int = 40) -> None:
        self._horizon = horizon
        self.spec = {
            "observations": {"front": (FRONT, "uint8"), "wrist": (WRIST, "uint8"), "state": ((2,), "float32")},
            "action": ((1,), "float32"),
            "num_actions": None,
            "low": [-1.0],
            "high": [1.0],
            "max_episode_steps": horizon,
            "has_success": True,
            "versions": {},
            "snapshots": True,
        }

    def reset(self, state_id: int) -> dict[str, NDArray[Any]]:
        """Begin the episode of ``state_id``."""
        rng = np.random.default_rng(state_id)
        self._front, self._wrist = (rng.integers(0, 256, shape, np.uint8) for shape in (FRONT, WRIST))
        self._state, self._steps = rng.uniform(-1, 1, 2), 0
        return self._observe()

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, NDArray[Any]], float, bool, bool, bool]:
        """Move by a hundredth of the action."""
        self._state[0] += 0.01 * float(action[0])
        self._steps += 1
        distance = float(abs(self._state[0] - self._state[1]))
        return self._observe(), 1.0 - distance, False, self._steps >= self._horizon, distance < NEAR

    def state(self) -> bytes:
        """Return everything that decides the rest of the episode."""
        return self._front.tobytes() + self._wrist.tobytes() + self._state.tobytes() + bytes([self._steps])

    def snapshot(self) -> dict[str, Any]:
        """Return images, place, goal and number of steps."""
        return {"front": self._front, "wrist": self._wrist, "state": self._state, "steps": self._steps}

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self._front, self._wrist = values["front"], values["wrist"]
        self._state, self._steps = values["state"], values["steps"]

    def close(self) -> None:
        """Hold nothing that must be freed."""

    def _observe(self) -> dict[str, NDArray[Any]]:
        place = round(100 * self._state[0]) % 256
        return {
            "front": self._front + np.uint8(self._steps),
            "wrist": self._wrist + np.uint8(place),
            "state": self._state.astype(np.float32),
        }


def make(env_id: str, options: dict[str, Any]) -> TwoCameras:
    """Create an environment; ``options`` may hold its ``horizon``."""
    return TwoCameras(**options)
