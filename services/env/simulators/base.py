"""Interface between the env service and the B environments of a session, which the service steps by chunks of
actions."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.embodied.environment import EnvSpec, ObservationMemory

__all__ = ["Chunk", "Look", "Named", "Simulator", "Started", "Stepping", "Stored"]

Named = dict[str, NDArray[Any]]
"""Observations of n environments by name, each an array [n, ...]. Valid until the next call of the simulator."""


class Look(Protocol):
    """Function that reads the observations of a request's n environments. Valid until the next call of the
    simulator."""

    def __call__(self, rows: NDArray[np.bool_] | None = None, *, final: bool = False) -> Named:
        """Return current (or ``final``) observations of the environments where ``rows`` [n] is True; None means all of
        them."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Started:
    """Results of starting n episodes.

    Attributes:
        look: reads observations.
        state_hashes: uint64 [n], hashes of the simulator's states.
        tasks: n task descriptions; '' if a task has none.
        lost: reasons why episodes did not begin, by row of the request.
    """

    look: Look
    state_hashes: NDArray[np.uint64]
    tasks: list[str]
    lost: dict[int, str]

    @property
    def observations(self) -> Named:
        """First observations [n, ...]."""
        return self.look()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stored:
    """Snapshots of n environments.

    Attributes:
        snapshots: n snapshots; b"" in rows of ``lost``.
        lost: reasons why episodes were aborted (the process hung or died), by row of the request.
    """

    snapshots: list[bytes]
    lost: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chunk:
    """Results of C actions in n environments.

    Attributes:
        look: reads observations.
        rewards: float32 [n, C]; terminated, truncated, success: bool [n, C].
        valid: int32 [n], number of executed actions; an environment stops at the end of its episode.
        state_hashes, tasks: as in ``Started``, for the episodes that began.
        lost: reasons why episodes were aborted (the simulator raised, hung or died), by row of the request.
        not_started: reasons why the next episode did not begin after one that ended, by row of the request.
    """

    look: Look
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    valid: NDArray[np.int32]
    state_hashes: NDArray[np.uint64]
    tasks: list[str]
    lost: dict[int, str]
    not_started: dict[int, str]

    @property
    def observations(self) -> Named:
        """Observations [n, ...] after the chunk; in rows where a new episode began, its first observations."""
        return self.look()

    @property
    def final_observations(self) -> Named:
        """Last observations [n, ...] of the episodes that ended; other rows are undefined."""
        return self.look(final=True)


class Stepping(Protocol):
    """A chunk of actions that the simulator is executing."""

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """Sockets that have data to read once the chunk is executed."""

    @property
    def until(self) -> float:
        """Deadline of the chunk (monotonic seconds)."""


class Simulator(Protocol):
    """Environments of one session. Blocking and not thread-safe: one thread creates and closes them.

    Other threads may call it as long as the first one lives and no two calls overlap.
    """

    @property
    def spec(self) -> EnvSpec:
        """Shapes, dtypes and bounds of observations and actions."""

    def described(self) -> EnvSpec:
        """Return the current spec. It differs from ``spec`` in ``has_success``, which becomes True once a step has
        reported whether it succeeded."""

    @property
    def memory(self) -> ObservationMemory:
        """Memory in which the current observations of all environments stay until the next call."""

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> Started:
        """Start an episode in each of ``env_ids`` [n].

        Everything random in the episode follows from its state id: equal ids and equal actions give equal episodes, in
        any environment of any process.
        """

    def step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any], next_state_ids: NDArray[np.int64] | None
    ) -> Chunk:
        """Execute ``actions`` [n, C, ...], C in each environment of ``env_ids`` [n]; an environment stops when its
        episode ends.

        No other environment moves. The caller has checked that no episode of ``env_ids`` has ended, and that the
        actions match ``spec``. After an episode ends, the environment starts the episode of its ``next_state_ids`` [n];
        None: it starts none.
        """

    def begin_step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any], next_state_ids: NDArray[np.int64] | None
    ) -> Stepping:
        """Begin a ``step`` without waiting for its result. The next call must be ``finish_step``."""

    def finish_step(self, stepping: Stepping) -> Chunk:
        """Wait until a chunk is executed or its time limit is reached, and return the result of the ``step``."""

    def snapshot(self, env_ids: NDArray[np.int32]) -> Stored:
        """Return snapshots of the running episodes of ``env_ids`` [n]; the snapshots do not affect the episodes.

        Requires ``spec.has_snapshots``. Raises ProtocolError if the environment holds something that cannot be stored.
        """

    def restore(self, env_ids: NDArray[np.int32], snapshots: Sequence[bytes]) -> Started:
        """Continue episodes in ``env_ids`` [n] from ``snapshots``, which another session or process may have made.

        Equal actions then give equal observations, rewards, ends and states, bit for bit.

        Raises:
            ProtocolError: a snapshot is damaged, or its simulator, task, version or options differ. Earlier rows may
                have been restored.
        """

    def film(self, env_id: int) -> tuple[bytes, str]:
        """Return ``(film of the newest episode as MP4, '')``, or ``(b"", reason)`` if there is no film."""

    def close(self) -> None:
        """Close the environments and free their resources."""
