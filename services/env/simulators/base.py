"""The environments of a session as the env service sees them: B side by side, stepped by chunks of actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.embodied.environment import EnvSpec

__all__ = ["Chunk", "Named", "Simulator", "Started"]

Named = dict[str, NDArray[Any]]
"""Observations by name, each [n, ...]. They are valid until the next call."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Started:
    """The beginnings of n episodes.

    Attributes:
        observations: the first ones, [n, ...].
        state_hashes: uint64 [n], of the simulator's states.
        tasks: n texts, '' where a task has no words.
        lost: why an episode did not begin, by its place in the request.
    """

    observations: Named
    state_hashes: NDArray[np.uint64]
    tasks: list[str]
    lost: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chunk:
    """Results of C actions in n environments.

    Attributes:
        observations: [n, ...], after the chunk, or the first ones of the next episode where one began.
        final_observations: [n, ...], of the episodes that ended; other rows mean nothing.
        rewards: float32 [n, C]; terminated, truncated, success: bool [n, C].
        valid: int32 [n], actions that were executed; an environment stops at the end of its episode.
        state_hashes, tasks: of the episodes that began.
        lost: why an episode broke off, by its place in the request: the simulator raised, hung or died.
        not_started: why the next episode of an ended one did not begin.
    """

    observations: Named
    final_observations: Named
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    valid: NDArray[np.int32]
    state_hashes: NDArray[np.uint64]
    tasks: list[str]
    lost: dict[int, str]
    not_started: dict[int, str]


class Simulator(Protocol):
    """Blocking and single-threaded: one thread makes, uses and closes it."""

    @property
    def spec(self) -> EnvSpec:
        """Shapes, types and bounds."""

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> Started:
        """Start an episode in each of ``env_ids`` [n].

        Everything random in the episode follows from its state id: equal ids and equal actions give equal episodes, in
        any environment of any process.
        """

    def step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any], next_state_ids: NDArray[np.int64] | None
    ) -> Chunk:
        """Execute ``actions`` [n, C, ...] in ``env_ids`` [n], each up to the end of its episode; others do not move.

        The caller has checked that none of them has ended, and that the actions fit ``spec``. Where an episode ends,
        the one of ``next_state_ids`` [n] begins; None: it stays over.
        """

    def film(self, env_id: int) -> tuple[bytes, str]:
        """The newest episode of an environment as an MP4 file, and why there is none, or ''."""

    def close(self) -> None:
        """Give everything back."""
