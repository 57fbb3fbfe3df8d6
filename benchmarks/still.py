"""An environment that costs nothing: what is left of a step is Penstock's own. The env service's child imports it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

SIZE = 39


class Still(gymnasium.Env[NDArray[np.float64], NDArray[np.float32]]):  # type: ignore[misc]
    """Shows the same 39 numbers for ever."""

    observation_space = gymnasium.spaces.Box(-1, 1, (SIZE,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    shown = np.linspace(-1, 1, SIZE)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Begin."""
        return self.shown, {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        """Nothing happens."""
        return self.shown, 0.0, False, False, {}


class StillPictures(gymnasium.Env[NDArray[np.uint8], NDArray[np.float32]]):  # type: ignore[misc]
    """Shows the same picture for ever."""

    observation_space = gymnasium.spaces.Box(0, 255, (224, 224, 3), np.uint8)
    action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    shown = np.full((224, 224, 3), 7, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Begin."""
        return self.shown, {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Nothing happens."""
        return self.shown, 0.0, False, False, {}


gymnasium.register("Still-v0", entry_point=Still, disable_env_checker=True, order_enforce=False)
gymnasium.register("StillPictures-v0", entry_point=StillPictures, disable_env_checker=True, order_enforce=False)
