"""Interfaces of adapters: one environment as an object, or all environments of a process in one object.

For type checkers alone. Adapters and the files that run beside them in the child process import only the standard
library, NumPy and the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BatchOutcome",
    "BatchedEnvironment",
    "Environment",
    "Filmable",
    "Message",
    "Outcome",
    "Restorable",
    "RestorableBatch",
    "Values",
]

Message = dict[str, Any]
Outcome = tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]
"""Observations, reward, terminated, truncated, success of one step."""
Values = dict[str, Any]
"""Values of a snapshot by name: None, bool, int, float, str, NumPy scalars and arrays, and tuples, lists and dicts
(with string keys) of these types."""
BatchOutcome = tuple[
    Mapping[str, NDArray[Any]], NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]
]  # fmt: skip
"""Observations [n, ...] by name, rewards [n], terminated [n], truncated [n], success [n] of one step."""


class Environment(Protocol):
    """One environment. Each adapter in ``backends`` implements this protocol; its ``make(env_id, options)`` returns an
    instance."""

    spec: Message
    """Properties: ``observations``, name -> (shape, dtype); ``action``, (shape, dtype); ``num_actions`` or None;
    ``low`` and ``high`` of actions; ``max_episode_steps`` or None; ``has_success``, which may become True during an
    episode; ``versions``; ``snapshots`` (True: restorable)."""
    task: str
    """Description of the task, or '' if there is none."""

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Start episode ``state_id``, which determines all randomness in it; return the first observations."""

    def step(self, action: Any) -> Outcome:
        """Execute one action."""

    def state(self) -> bytes:
        """Return the full state of the simulator: from equal states, equal actions lead to equal episodes."""

    def close(self) -> None:
        """Free the resources of the environment."""


class Restorable(Environment, Protocol):
    """An environment that continues from a stored state. Its spec has ``snapshots: True``."""

    def snapshot(self) -> Values:
        """Return everything that determines the rest of the episode. Does not change how the episode goes on."""

    def restore(self, values: Values) -> None:
        """Continue from the snapshot of another environment with the same id and options: equal actions then give
        equal observations, rewards and ends, bit for bit."""


class Filmable(Restorable, Protocol):
    """An environment with a camera. ``snapshot`` and ``restore`` work only if its spec has ``snapshots: True``."""

    frames_per_s: float
    """Steps per second of simulated time."""

    def render(self) -> NDArray[np.uint8]:
        """Render the current state as [H, W, 3] with even H and W."""


class BatchedEnvironment(Protocol):
    """N environments in one object, numbered from 0 to N - 1. Methods take ``env_ids`` [n], the numbers of n different
    environments."""

    spec: Message
    """Properties of each environment, as in ``Environment``."""
    task: str
    """Description of the task of all environments, or '' if there is none."""

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Start episode ``state_ids[i]`` in environment ``env_ids[i]``; return the first observations [n, ...].

        The state id determines all randomness of an episode, whatever else the call starts. Episodes of other
        environments do not move.
        """

    def step(self, env_ids: NDArray[np.int32], actions: NDArray[Any]) -> BatchOutcome:
        """Execute one action [n, ...] in each of ``env_ids``, all of which have a running episode. Episodes of other
        environments do not move."""

    def states(self, env_ids: NDArray[np.int32]) -> Sequence[bytes]:
        """Return the state of each environment: from equal states, equal actions lead to equal episodes."""

    def close(self) -> None:
        """Free the resources of all environments."""


class RestorableBatch(BatchedEnvironment, Protocol):
    """Environments that continue from stored states. Their spec has ``snapshots: True``."""

    def snapshot(self, env_id: int) -> Values:
        """Return everything that determines the rest of the episode of ``env_id``."""

    def restore(self, env_id: int, values: Values) -> None:
        """Continue in ``env_id`` from the snapshot of any environment with the same task and options."""
