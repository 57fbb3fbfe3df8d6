"""File format of demonstrations: recorded episodes of a simulator, for warm starts and world models.

The file is a frame (``protocol.frame``) of flat columns over all steps plus ``cu_seqlens``. Actions have the
simulator's format, so that policies of any kind can learn from them.

Shapes: N = steps of all episodes, E = episodes, ... = the shape of one observation or action.

World models also read ``about``: the ``ActionSpace`` under ``action``, and ``task``, ``backend``, ``versions``,
``horizon`` and ``noise``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import ConfigError, DataError, FrameError
from penstock.shared.protocol.codec import SCHEMA
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.frame import decode_frame, encode_frame

__all__ = [
    "ActionSpace",
    "Demonstrations",
    "check_demonstrations",
    "read_demonstrations",
    "write_demonstrations",
]

KIND = "Demonstrations"
_DTYPES = {"rewards": "float32", "cu_seqlens": "int64", "succeeded": "bool"}
_ENDS = ("final_observations", "terminated")
"""Columns that a file may lack, because warm starts do not use them."""


class ActionSpace(msgspec.Struct, frozen=True, kw_only=True):
    """Action space of a simulator: ``num_actions`` discrete actions, or, if it is None, a box from ``low`` to
    ``high``."""

    num_actions: int | None
    low: list[float]
    high: list[float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demonstrations:
    """Recorded episodes: the steps of all episodes in one array per quantity, one episode after another.

    Attributes:
        observations: [N, ...] by name, before each step.
        actions: [N, ...] in the format of the simulator.
        rewards: float32 [N].
        cu_seqlens: int64 [E+1], offsets of the episodes; none is empty.
        succeeded: bool [E], True if the task was solved at some step.
        final_observations: [E, ...] by name, after the last step of each episode; {} if the file has none.
        terminated: bool [E], True if the task ended the episode, False if a limit truncated it; None: unknown.
        about: metadata: simulator, task, source of the actions, reset ids.

    Raises:
        DataError: from ``check``, if the columns are inconsistent.
    """

    observations: dict[str, NDArray[Any]]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    cu_seqlens: NDArray[np.int64]
    succeeded: NDArray[np.bool_]
    final_observations: dict[str, NDArray[Any]] = field(default_factory=dict)
    terminated: NDArray[np.bool_] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.cu_seqlens) - 1

    def check(self) -> None:
        """Raise DataError unless the columns are consistent and every number is finite."""
        cuts, count = self.cu_seqlens, len(self.actions)
        if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != count or (np.diff(cuts) < 1).any():
            raise DataError(f"cu_seqlens do not cut {count} steps into episodes")
        if len(self.succeeded) != self.num_episodes:
            raise DataError(f"'succeeded' has {len(self.succeeded)} rows for {self.num_episodes} episodes")
        for name, column in {**self.observations, "actions": self.actions, "rewards": self.rewards}.items():
            if len(column) != count:
                raise DataError(f"'{name}' has {len(column)} rows for {count} steps")
            if not np.isfinite(column).all():
                raise DataError(f"a number of '{name}' is not finite")
        self._check_ends()

    def _check_ends(self) -> None:
        shapes = {name: (self.num_episodes, *column.shape[1:]) for name, column in self.observations.items()}
        finals = self.final_observations
        if finals and {name: column.shape for name, column in finals.items()} != shapes:
            raise DataError(f"'final_observations' do not have the {self.num_episodes} rows of observations")
        if not all(np.isfinite(column).all() for column in finals.values()):
            raise DataError("a number of 'final_observations' is not finite")
        if self.terminated is not None and len(self.terminated) != self.num_episodes:
            raise DataError(f"'terminated' has {len(self.terminated)} rows for {self.num_episodes} episodes")


def write_demonstrations(path: Path, demonstrations: Demonstrations) -> None:
    """Write ``demonstrations`` to the file ``path`` atomically.

    Raises:
        DataError: the file cannot be written, or the columns are inconsistent.
    """
    demonstrations.check()
    names = ["observations", "actions", "about", *_DTYPES]
    names += [name for name in _ENDS if getattr(demonstrations, name) is not None]
    tree = {"schema": SCHEMA, "kind": KIND, **{name: getattr(demonstrations, name) for name in names}}
    part = path.with_name(path.name + ".partial")
    try:
        with part.open("wb") as file:
            file.writelines(encode_frame(tree))
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None


def read_demonstrations(path: Path) -> Demonstrations:
    """Read and check a file of demonstrations.

    Raises:
        DataError: the file cannot be read, or holds no valid demonstrations.
    """
    try:
        tree = decode_frame(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except FrameError as error:
        raise DataError(f"{path} holds no demonstrations, which `penstock record` writes: {error}") from None
    if not isinstance(tree, dict) or (tree.get("kind"), tree.get("schema")) != (KIND, SCHEMA):
        raise DataError(f"{path} holds no demonstrations, which `penstock record` writes")
    try:
        found = _from_tree(tree)
        found.check()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return found


def check_demonstrations(demonstrations: Demonstrations, observations: tuple[str, ...], spec: EnvSpec) -> None:
    """Check that the observations and actions fit a simulator.

    Args:
        observations: names of the observations that the policy reads.

    Raises:
        ConfigError: an observation is missing, a shape differs, or a discrete action is out of range.
    """
    pairs = {
        f"observation '{name}'": (demonstrations.observations.get(name), spec.observations[name].shape)
        for name in observations
    }
    pairs["actions"] = demonstrations.actions, spec.action_shape
    for what, (column, shape) in pairs.items():
        if column is None or column.shape[1:] != shape:
            found = "missing" if column is None else f"of shape {list(column.shape[1:])}"
            raise ConfigError(
                f"warm_start.demonstrations: {what} in the file: {found}; '{spec.env_id}' ({spec.backend}) has "
                f"{list(shape)}"
            )
    actions = demonstrations.actions
    if spec.num_actions is not None and (actions.dtype.kind not in "iu" or not _within(actions, spec.num_actions)):
        raise ConfigError(
            f"warm_start.demonstrations: actions of '{spec.env_id}' ({spec.backend}) are 0 to {spec.num_actions - 1}"
        )


def _within(actions: NDArray[Any], num_actions: int) -> bool:
    return bool(actions.min() >= 0 and actions.max() < num_actions)


def _from_tree(tree: dict[str, Any]) -> Demonstrations:
    observations, actions = tree.get("observations"), tree.get("actions")
    named = isinstance(observations, dict) and all(_is_column(column) for column in observations.values())
    if not named or not _is_column(actions) or not isinstance(tree.get("about"), dict):
        raise DataError("'observations', 'actions' or 'about' is not what it may be")
    for name, dtype in {**_DTYPES, **({"terminated": "bool"} if "terminated" in tree else {})}.items():
        column = tree.get(name)
        if not _is_column(column) or column.dtype != np.dtype(dtype) or column.ndim != 1:  # type: ignore[union-attr]
            raise DataError(f"'{name}' is not a column of {dtype}")
    finals = tree.get("final_observations", {})
    if not isinstance(finals, dict) or not all(_is_column(column) for column in finals.values()):
        raise DataError("'final_observations' is not what it may be")
    return Demonstrations(
        observations=tree["observations"], actions=tree["actions"], about=tree["about"],
        **{name: tree[name] for name in (*_DTYPES, *_ENDS) if name in tree},
    )  # fmt: skip


def _is_column(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0
