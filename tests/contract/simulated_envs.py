"""Environments that a child of the env service imports in tests, as ``env_id="simulated_envs:..."``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import FrameStackObservation
from numpy.typing import NDArray

FOLDER = str(Path(__file__).parent)
"""Directory for the ``PYTHONPATH`` of the child."""
STEP, RAISE, DIE, HANG, NOT_A_NUMBER = range(5)
UNSTARTABLE = 666
"""The state id at which a reset raises."""
PROMPTING = 667
"""The state id at which a reset asks the user a question, as libraries do that need a licence or a download."""
DEADLY = 3
IMAGE = (480, 640, 3)


class Fragile(gymnasium.Env[dict[str, NDArray[Any]], int]):
    """Fails, dies or hangs as its action demands. Two observations: an image of the state id, and the number of steps.

    The task is solved after three steps, and the episode ends after four.
    """

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "steps": gymnasium.spaces.Box(0, np.inf, (1,), np.float32),
        }
    )
    action_space = gymnasium.spaces.Discrete(5)
    task = "count to four"

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed == UNSTARTABLE:
            raise RuntimeError("no scene for this seed")
        if seed == PROMPTING:
            input("Do you accept the licence? [y/N] ")
        self.image, self.steps = np.full((4, 4, 3), (seed or 0) % 256, np.uint8), 0
        return self._observe(float(self.steps)), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == RAISE:
            raise RuntimeError("the arm left the table")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            time.sleep(60)
        self.steps += 1
        number = float("nan") if action == NOT_A_NUMBER else float(self.steps)
        return self._observe(number), 1.0, self.steps == 4, False, {"success": self.steps == 3}

    def _observe(self, number: float) -> dict[str, NDArray[Any]]:
        return {"image": self.image, "steps": np.asarray([number], np.float32)}


class Camera(gymnasium.Env[NDArray[np.uint8], NDArray[np.float32]]):
    """Noise of the episode's seed, shifted by the steps so far and by the sum of the action; ends after four steps."""

    observation_space = gymnasium.spaces.Box(0, 255, IMAGE, np.uint8)

    def __init__(self, action_shape: tuple[int, ...] = (1,)) -> None:
        self.action_space = gymnasium.spaces.Box(-1, 1, tuple(action_shape), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.noise = self.np_random.integers(0, 256, IMAGE, np.uint8)
        return self.noise, {}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.noise = self.noise + np.uint8(self.steps + round(float(action.sum())))
        return self.noise, float(self.steps), self.steps == 4, False, {}


class Slow(gymnasium.Env[NDArray[np.float32], int]):
    """Takes longer to create than one attempt of a request may last; each creation adds a line to the file ``made``."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, made: str) -> None:
        with Path(made).open("a") as file:
            file.write("made\n")
        time.sleep(0.5)


class Stuck(Fragile):
    """Begins episodes, and fails at every step."""

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise KeyError("joint")


class PointReach(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """A point on a line. It observes its position and its goal in [-1, 1]; a step costs their distance and 0.1."""

    observation_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-0.3, 0.3, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._state = self.np_random.uniform(-1, 1, 2)
        return self._state.astype(np.float32), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._state[0] = np.clip(self._state[0] + np.clip(action[0], -0.3, 0.3), -2, 2)
        distance = abs(self._state[0] - self._state[1])
        return self._state.astype(np.float32), -distance - 0.1, bool(distance < 0.05), False, {}


class Solvable(CartPoleEnv):
    """Cart pole with a camera; each step says that the task is not solved."""

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation, reward, over, cut, _ = super().step(action)
        return observation, float(reward), over, cut, {"is_success": False}


class Late(CartPoleEnv):
    """Cart pole whose last step alone says if the task is solved: if the pole falls to the right."""

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation, reward, over, cut, _ = super().step(action)
        return observation, float(reward), over, cut, {"success": bool(observation[2] > 0)} if over else {}


class Restless(PointReach):
    """Begins in another state each time, even for the same seed, as a simulator does that keeps state over a reset."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.state = np.frombuffer(os.urandom(16), np.uint64) / 2.0**64
        self._state = self.state.copy()
        return self._state.astype(np.float32), {}


class Brittle(Fragile):
    """Has snapshots; its process dies when it continues an episode of ``DEADLY`` steps."""

    def snapshot(self) -> dict[str, Any]:
        return {"image": self.image, "steps": self.steps}

    def restore(self, values: dict[str, Any]) -> None:
        if values["steps"] == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        self.image, self.steps = values["image"], values["steps"]


for entry_point in (Fragile, Camera, Slow, Stuck, Restless, Brittle, Solvable, Late):
    gymnasium.register(f"{entry_point.__name__}-v0", entry_point=entry_point)

gymnasium.register("PointReach-v0", entry_point=PointReach, max_episode_steps=20)
gymnasium.register(
    "Stacked-v0",
    entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv",
    additional_wrappers=(FrameStackObservation.wrapper_spec(stack_size=2),),
)
