"""What every simulator does: B environments side by side, in NumPy, without automatic resets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.environment import EnvSpec

__all__ = ["Simulator", "Transition"]


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """One step of n environments.

    Attributes:
        observations: [n, ...], after the step; where an episode ended, its final one.
        rewards: float32 [n].
        terminated: bool [n], the task is over (success or failure): no value beyond.
        truncated: bool [n], cut off by a limit: the value of the final observation still counts.
    """

    observations: NDArray[Any]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class Simulator(Protocol):
    """Blocking and single-threaded: one thread makes, uses and closes it."""

    @property
    def spec(self) -> EnvSpec:
        """Shapes, types and bounds."""

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> NDArray[Any]:
        """Start an episode in each of ``env_ids`` [n].

        Everything random in the episode follows from its state id: equal ids and equal actions give equal episodes, in
        any environment of any process.

        Returns:
            Observations [n, ...], not changed by later calls.
        """

    def step(self, env_ids: NDArray[np.int32], actions: NDArray[Any]) -> Transition:
        """One action [n, ...] in each of ``env_ids`` [n]; the others do not move.

        The caller has checked that none of them has ended, and that the actions fit ``spec``.
        """

    def close(self) -> None:
        """Give everything back."""
