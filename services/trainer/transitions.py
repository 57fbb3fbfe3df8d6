"""Experience of continuous control in columns: what a replay buffer takes, and what an on-policy update takes.

Shape legend: N = transitions, O = numbers of an observation, A = dimensions of an action, S = segments, S1 = S + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import ProtocolError

__all__ = ["Rollout", "Transitions"]

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transitions:
    """Steps of any episodes; those of one episode in their order.

    Attributes:
        episodes_N: int64, number of the episode, from 0.
        steps_N: int64, number of the step in its episode, from 0.
        actions_NA: as the policy gave them, before they were scaled to the bounds of an environment.
        next_observations_NO: after the step; at the end of an episode its final one.
        terminated_N: the task is over: no value beyond.
        truncated_N: cut off by a limit: the value of the next observation still counts.

    Raises:
        ProtocolError: lengths differ, or a number is not finite.
    """

    episodes_N: NDArray[np.int64]
    steps_N: NDArray[np.int64]
    observations_NO: Floats
    actions_NA: Floats
    rewards_N: Floats
    next_observations_NO: Floats
    terminated_N: Flags
    truncated_N: Flags

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in self.__slots__}
        _check_lengths(columns, len(self.steps_N))
        _check_finite(columns)

    def __len__(self) -> int:
        return len(self.steps_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Segments of episodes, one after the other: consecutive steps, to the end of the episode or of the rollout.

    Attributes:
        logprobs_N: of the action under the policy that chose it, in nats; the density of the whole action.
        cu_seqlens_S1: int64, cuts N into segments, none empty.
        last_observations_SO: after the last step of each segment.
        terminated_S: the segment ended with its task: no value beyond. Otherwise it was cut off, by a limit of the
            environment or by the end of the rollout, and the value of its last observation counts.

    Raises:
        ProtocolError: lengths differ, a segment is empty, or a number is not finite.
    """

    observations_NO: Floats
    actions_NA: Floats
    logprobs_N: Floats
    rewards_N: Floats
    cu_seqlens_S1: NDArray[np.int64]
    last_observations_SO: Floats
    terminated_S: Flags

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in self.__slots__}
        _check_lengths({name: column for name, column in columns.items() if "_N" in name}, len(self.rewards_N))
        num_segments = len(self.cu_seqlens_S1) - 1
        _check_lengths({name: column for name, column in columns.items() if name.endswith(("SO", "S"))}, num_segments)
        cuts = self.cu_seqlens_S1
        if num_segments < 1 or cuts[0] != 0 or cuts[-1] != len(self.rewards_N) or (np.diff(cuts) <= 0).any():
            raise ProtocolError(f"cu_seqlens does not cut {len(self.rewards_N)} transitions into segments, none empty")
        _check_finite(columns)

    def __len__(self) -> int:
        return len(self.rewards_N)


def _check_lengths(columns: Mapping[str, NDArray[np.generic]], expected: int) -> None:
    for name, column in columns.items():
        if len(column) != expected:
            raise ProtocolError(f"{_plain(name)} has {len(column)} rows, the other columns {expected}")


def _check_finite(columns: Mapping[str, NDArray[np.generic]]) -> None:
    for name, column in columns.items():
        bad = np.flatnonzero(~np.isfinite(column).reshape(len(column), -1).all(axis=1))
        if len(bad):
            raise ProtocolError(f"{_plain(name)}: a number of row {bad[0]} is not finite")


def _plain(name: str) -> str:
    return name.rpartition("_")[0]
