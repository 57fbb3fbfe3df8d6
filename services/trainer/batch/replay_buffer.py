"""Replay buffer: a ring of columns with the newest transitions. Samples depend only on seed, sample number and content.

Shape legend: N = given transitions, K = stored transitions, B = sampled transitions, G = groups with a stored
transition, O = components of an observation, A = components of an action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.batch.episodes import Transitions
from penstock.shared.config.embodied import ReplayBufferConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.protocol.ids import Draw

__all__ = ["ReplayBuffer", "sampled_rows"]

CGROUPS = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")
_COUNTERS = ("inserted", "groups")
"""Entries of the state besides the columns."""


def sampled_rows(seed: int, number: int, *, stored: int, size: int) -> NDArray[np.int64]:
    """Draw ``size`` row indices from 0 to ``stored - 1``, uniformly and with replacement. The result depends only on
    the arguments.

    Args:
        number: number of the sample; unique within a run.
    """
    return np.random.default_rng([seed, number]).integers(0, stored, size)


class ReplayBuffer:
    """Stores the newest ``capacity`` transitions.

    A group is not inserted again while any of its transitions is stored.

    Args:
        seed: seed of all samples.

    Raises:
        ConfigError: the columns need more than ``max_bytes``, or do not fit twice into this trainer's memory.
    """

    def __init__(self, config: ReplayBufferConfig, *, observation_size: int, action_size: int, seed: int) -> None:
        config.check_bytes(
            observation_size=observation_size, action_size=action_size, memory_bytes=memory_bytes()
        )  # fmt: skip
        shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "observations": ((observation_size,), np.float32),
            "actions": ((action_size,), np.float32),
            "rewards": ((), np.float32),
            "next_observations": ((observation_size,), np.float32),
            "terminated": ((), np.bool_),
        }
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros((config.capacity, *shape), dtype) for name, (shape, dtype) in shapes.items()
        }
        self.capacity, self._seed = config.capacity, seed
        self.inserted = 0
        """Number of transitions ever inserted."""
        self._groups: deque[tuple[Draw, int]] = deque()
        """Groups with a stored transition, each with the value of ``inserted`` after the group's last transition."""

    def __len__(self) -> int:
        return min(self.inserted, self.capacity)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the entries of ``state`` that have one row per transition."""
        return tuple(self._columns)

    def insert(self, transitions: Transitions) -> int:
        """Insert the transitions of groups that are not stored yet, and return the number of inserted transitions.

        A full buffer overwrites its oldest transitions.
        """
        fresh_N = self._admit(transitions)
        given = {
            "observations": transitions.observations_NO,
            "actions": transitions.actions_NA,
            "rewards": transitions.rewards_N,
            "next_observations": transitions.next_observations_NO,
            "terminated": transitions.terminated_N,
        }
        places = (self.inserted + np.arange(len(fresh_N))) % self.capacity
        for name, column in given.items():
            self._columns[name][places[-self.capacity :]] = column[fresh_N[-self.capacity :]]
        self.inserted += len(fresh_N)
        while self._groups and self._groups[0][1] <= self.inserted - self.capacity:
            self._groups.popleft()
        return len(fresh_N)

    def _admit(self, transitions: Transitions) -> NDArray[np.int64]:
        """Register the groups that are not stored yet, and return the indices of their rows in ``transitions``."""
        known = {draw for draw, _ in self._groups}
        fresh, end = [], self.inserted
        for group, draw in enumerate(transitions.draws):
            rows = np.flatnonzero(transitions.group_N == group)
            if draw in known or not len(rows):
                continue
            known.add(draw)
            fresh.append(rows)
            end += len(rows)
            self._groups.append((draw, end))
        return np.concatenate([np.zeros(0, np.int64), *fresh])

    def sample(self, number: int, size: int) -> dict[str, Tensor]:
        """Return ``size`` random transitions, with replacement.

        ``observations`` and ``next_observations`` are [B, O], ``actions`` [B, A], ``rewards`` and ``terminated`` [B].
        The sample depends only on the seed, ``number`` and the content of the buffer, which must not be empty.
        """
        rows = sampled_rows(self._seed, number, stored=len(self), size=size)
        return {name: torch.from_numpy(column[rows]) for name, column in self._columns.items()}

    def state(self) -> dict[str, Tensor]:
        """Return copies of the columns [K, ...], in storage order, and of the counters.

        ``inserted``: int64 [1]. ``groups``: int64 [G, 3], ``ordinal`` and ``n`` of each group's draw, and the value
        of ``inserted`` after the group's last transition.
        """
        columns = {name: torch.from_numpy(column[: len(self)].copy()) for name, column in self._columns.items()}
        groups = [[draw.ordinal, draw.n, end] for draw, end in self._groups]
        return columns | {
            "inserted": torch.tensor([self.inserted]),
            "groups": torch.tensor(groups, dtype=torch.int64).reshape(-1, 3),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned; the run then continues as if not interrupted.

        Raises:
            CheckpointError: ``state`` has columns or shapes that do not fit this buffer; nothing was loaded.
        """
        if state.keys() != {*self._columns, *_COUNTERS}:
            raise CheckpointError(f"replay buffer: the columns are {sorted(state)}; nothing else can be loaded")
        if state["inserted"].shape != (1,) or state["groups"].ndim != 2 or state["groups"].shape[1] != 3:
            raise CheckpointError("replay buffer: 'inserted' or 'groups' has another shape than expected")
        inserted = int(state["inserted"][0])
        kept = min(inserted, self.capacity)
        for name, column in self._columns.items():
            saved = state[name].numpy()
            if saved.shape != (kept, *column.shape[1:]) or saved.dtype != column.dtype:
                raise CheckpointError(
                    f"replay buffer: '{name}' is {saved.dtype} {list(saved.shape)}, expected {column.dtype} "
                    f"{[kept, *column.shape[1:]]}: resume with the capacity and the environment it was saved with"
                )
        self._groups = deque((Draw(ordinal, n), end) for ordinal, n, end in state["groups"].tolist())
        self.inserted = inserted
        for name, column in self._columns.items():
            column[:kept] = state[name].numpy()


def memory_bytes() -> int:
    """Return the memory of this host, or the lowest limit of this process's cgroups (version 1 or 2) if that is
    lower."""
    found = [psutil.virtual_memory().total]
    try:
        lines = CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _limits(CGROUP_MOUNT, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(CGROUP_MOUNT / "memory", path, "memory.limit_in_bytes")
    return min(found)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of the cgroup ``path`` and of its ancestors, up to the mount point ``root``. Directories that
    do not exist are skipped, because a process in a container may see the path that its cgroup has on the host."""
    folder, limits = root / path.lstrip("/"), []
    for one in (folder, *folder.parents):
        if not one.is_relative_to(root):
            break
        try:
            text = (one / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # without a limit: "max"
            limits.append(int(text))
    return limits
