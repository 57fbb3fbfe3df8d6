"""Episodes as columns for the update rules: one row for each decision of a valid episode.

Shape legend: G = groups, E = valid episodes, E1 = E + 1, N = their decisions, C = actions of a decision, A = components
of an action, O = components of an observation, ... = the shape of one observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import Draw

__all__ = ["EpisodeColumns", "Transitions", "episode_columns", "episode_facts"]

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeColumns:
    """Valid episodes of a batch, one after the other; failed episodes are left out.

    Attributes:
        observations: [N, ...] by name, before each decision; final_observations: [E, ...] after each episode.
        actions_NCA, logprobs_NCA: actions as sampled, and their log-probs under the sampling policy.
        executed_NC: actions that the simulator executed; those after the end of an episode were not.
        rewards_N: sum over the executed actions.
        cu_seqlens_E1: int64 offsets that split N into episodes; none is empty.
        terminated_E: the task ended, and no value follows. Otherwise the episode was truncated, and the value of its
            final observation is bootstrapped.
        returns_E: undiscounted; succeeded_E: the task was solved at some step.
        group_E: int64, index of the group; draws: draw of each group.
    """

    observations: dict[str, NDArray[Any]]
    final_observations: dict[str, NDArray[Any]]
    actions_NCA: NDArray[Any]
    logprobs_NCA: Floats
    executed_NC: Flags
    rewards_N: Floats
    cu_seqlens_E1: NDArray[np.int64]
    terminated_E: Flags
    truncated_E: Flags
    returns_E: Floats
    succeeded_E: Flags
    group_E: NDArray[np.int64]
    draws: tuple[Draw, ...]
    num_failed: int

    def __len__(self) -> int:
        return len(self.rewards_N)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of decisions of each episode, [E]."""
        return np.diff(self.cu_seqlens_E1)

    @property
    def last(self) -> NDArray[np.int64]:
        """Row of the last decision of each episode, [E]."""
        return self.cu_seqlens_E1[1:] - 1

    def next_observations(self) -> dict[str, NDArray[Any]]:
        """Return the observations after each decision, [N, ...]: those of the next decision, or the final observations
        of the episode."""
        following = {name: np.roll(column, -1, axis=0) for name, column in self.observations.items()}
        for name, column in following.items():
            column[self.last] = self.final_observations[name]
        return following


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transitions:
    """Decisions of groups for a replay buffer, ordered by group.

    Attributes:
        group_N: int64, index in ``draws`` of the row's group, ascending.
        actions_NA: all components of a decision.
        next_observations_NO: observations after the decision; at the end of an episode its final ones.
        terminated_N: the task ended, and no value follows.
    """

    draws: tuple[Draw, ...]
    group_N: NDArray[np.int64]
    observations_NO: Floats
    actions_NA: Floats
    rewards_N: Floats
    next_observations_NO: Floats
    terminated_N: Flags


def episode_columns(groups: Sequence[EpisodeGroup]) -> EpisodeColumns:
    """Return the valid episodes of a batch in the order of its groups.

    Raises:
        ProtocolError: every episode failed, groups differ in their observation or action space, an episode continues
            after its end, or a number is not finite. The message names the draw of a bad group.
    """
    own = [_counted(group, place) for place, group in enumerate(groups)]
    num_failed = sum(group.num_trajectories - len(part.returns_E) for group, part in zip(groups, own, strict=True))
    if not sum(len(part) for part in own):
        raise ProtocolError(f"all {num_failed} episodes of the batch failed: nothing to train on")
    _check_spaces(own)
    ends = np.cumsum([0, *(len(part) for part in own)])
    cuts = [part.cu_seqlens_E1[1:] + start for part, start in zip(own, ends[:-1], strict=True)]

    def named(field: str) -> dict[str, NDArray[Any]]:
        return {name: np.concatenate([getattr(part, field)[name] for part in own]) for name in getattr(own[0], field)}

    def joined(field: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, field) for part in own])

    return EpisodeColumns(
        observations=named("observations"),
        final_observations=named("final_observations"),
        cu_seqlens_E1=np.concatenate([np.zeros(1, np.int64), *cuts]),
        draws=tuple(group.draw for group in groups),
        num_failed=num_failed,
        **{name: joined(name) for name in EpisodeColumns.__slots__ if name not in _NOT_JOINED},
    )


_NOT_JOINED = ("observations", "final_observations", "cu_seqlens_E1", "draws", "num_failed")


def episode_facts(columns: EpisodeColumns) -> dict[str, float]:
    """Return metrics of returns, successes and lengths of the batch; lengths count executed actions."""
    returns_E = columns.returns_E.astype(np.float64)
    steps_E = np.add.reduceat(columns.executed_NC.sum(1), columns.cu_seqlens_E1[:-1])
    return {
        "reward/mean": float(returns_E.mean()),
        "reward/std": float(returns_E.std()),
        "reward/min": float(returns_E.min()),
        "reward/max": float(returns_E.max()),
        "success/rate": float(columns.succeeded_E.mean()),
        "episode/length": float(steps_E.mean()),
        "episode/length_max": float(steps_E.max()),
        "episode/truncated": float((columns.truncated_E & ~columns.terminated_E).mean()),
        "groups/count": float(len(columns.draws)),
        "sequences/count": float(len(returns_E)),
        "sequences/failed": float(columns.num_failed),
        "tokens/scored": float(len(columns)),
    }


def _counted(group: EpisodeGroup, place: int) -> EpisodeColumns:
    """Return the valid episodes of one group; ``place`` is the index of the group in the batch."""
    lengths_G = group.lengths
    counts_G = ~group.failed & (lengths_G > 0)
    rows = np.flatnonzero(np.repeat(counts_G, lengths_G))
    executed_NC = np.arange(group.actions.shape[1]) < group.valid[rows, None]
    cuts = np.concatenate([[0], np.cumsum(lengths_G[counts_G])]).astype(np.int64)
    terminated_E, truncated_E = _ends(group, rows, executed_NC, cuts)
    columns = EpisodeColumns(
        observations={name: column[rows] for name, column in group.observations.items()},
        final_observations={name: column[counts_G] for name, column in group.final_observations.items()},
        actions_NCA=group.actions[rows],
        logprobs_NCA=group.logprobs[rows],
        executed_NC=executed_NC,
        rewards_N=np.where(executed_NC, group.rewards[rows], 0).sum(1, dtype=np.float32),
        cu_seqlens_E1=cuts,
        terminated_E=terminated_E,
        truncated_E=truncated_E,
        returns_E=group.returns[counts_G],
        succeeded_E=group.succeeded[counts_G],
        group_E=np.full(int(counts_G.sum()), place, np.int64),
        draws=(group.draw,),
        num_failed=int((~counts_G).sum()),
    )
    _check_finite(columns)
    return columns


def _ends(
    group: EpisodeGroup, rows: NDArray[np.int64], executed_NC: Flags, cuts: NDArray[np.int64]
) -> tuple[Flags, Flags]:
    """Return the flags terminated and truncated of each episode's last executed action, [E] each.

    Raises:
        ProtocolError: an action before the last executed one of its episode has such a flag.
    """
    last = cuts[1:] - 1
    at = executed_NC[last].sum(1) - 1
    over_NC = (group.terminated | group.truncated)[rows] & executed_NC
    over_NC[last, at] = False
    if over_NC.any():
        raise ProtocolError(f"group {group.draw}: an episode goes on after it was over")
    return group.terminated[rows[last], at], group.truncated[rows[last], at]


def _check_finite(columns: EpisodeColumns) -> None:
    arrays = {"log-probs": columns.logprobs_NCA, "actions": columns.actions_NCA, "rewards": columns.rewards_N}
    arrays |= {"returns": columns.returns_E, **columns.observations}
    arrays |= {f"final {name}": column for name, column in columns.final_observations.items()}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ProtocolError(f"group {columns.draws[0]}: a number of its {name} is not finite")


def _check_spaces(own: Sequence[EpisodeColumns]) -> None:
    first = _space(own[0])
    for part in own:
        if _space(part) != first:
            raise ProtocolError(f"group {part.draws[0]} is of another space than group {own[0].draws[0]}")


def _space(columns: EpisodeColumns) -> dict[str, Any]:
    arrays = {**columns.observations, "actions": columns.actions_NCA}
    return {name: (array.dtype.name, array.shape[1:]) for name, array in arrays.items()}
