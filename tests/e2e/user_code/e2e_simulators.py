"""Simulator as users write it: a Gymnasium environment. The env service's children import this file by PYTHONPATH."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class Arm(CartPoleEnv):
    """Cart pole that begins ``good`` episodes, then raises at the next ``failures`` resets.

    Later resets wait until a file ``healed`` is in ``folder``, where all processes count their resets together.
    """

    def __init__(self, folder: str, good: int, failures: int, **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.good, self.failures = Path(folder), good, failures

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        counter = self.folder / "resets"
        with counter.open("ab") as file:
            file.write(b".")
        failed = counter.stat().st_size - self.good
        if 0 < failed <= self.failures:
            raise RuntimeError("the arm has lost its base")
        deadline = time.monotonic() + 120  # below environment.step_limit_s, after which the process is killed
        while failed > 0 and not (self.folder / "healed").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return super().reset(seed=seed, options=options)


gymnasium.register("Arm-v0", entry_point=Arm, max_episode_steps=20)
