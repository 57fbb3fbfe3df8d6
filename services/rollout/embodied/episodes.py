"""Episodes of a ticket: requests, records, and the resulting group. Pure functions and data.

Shapes: G = episodes of a group, D = decisions of an episode, C = actions of a decision, A = components of an action,
S = version spans, ... = the shape of one observation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.services.rollout.embodied.noise import NoiseSource
from penstock.shared.config.embodied import SoftActorCriticConfig
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import new_attempt
from penstock.shared.protocol.messages import Ticket

__all__ = ["UNEQUAL", "Episode", "Label", "Record", "episode_group", "failed_episodes"]

UNEQUAL = "the simulator does not begin equal ids in equal states"
Label = tuple[int, str]
"""Policy version and short digest of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """Data of one complete episode; ``EpisodeGroup`` explains the arrays."""

    observations: dict[str, NDArray[Any]]
    final_observations: dict[str, NDArray[Any]]
    actions: NDArray[Any]
    logprobs: NDArray[np.float32]
    valid: NDArray[np.int32]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    succeeded: bool
    solved_at_end: bool
    spans: list[tuple[Label, int]]
    """(label, index of the first decision with this label), in order."""
    state_hash: int
    task: str

    @property
    def num_decisions(self) -> int:
        """Number of decisions, D."""
        return len(self.valid)

    @property
    def total(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(self.rewards.sum(dtype=np.float64))


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One episode of a ticket. The episode ends with a record, as lost, or as superseded: another policy version
    replaced the version that the episode requires.

    Attributes:
        noise: noise of its actions; None: it takes the mean of the policy.
        version: version that every decision must come from; None: any.
        on_end: called when the episode ends.
        unwanted: True if no ticket waits for it any more.
        superseded_by: version that replaced the required one.
    """

    reset_id: int
    noise: NoiseSource | None = None
    version: int | None = None
    on_end: Callable[[Episode], None] = field(default=lambda episode: None)
    unwanted: bool = False
    record: Record | None = None
    lost: str = ""
    superseded_by: int | None = None

    def end(self, *, record: Record | None = None, lost: str = "", superseded_by: int | None = None) -> None:
        """End the episode and call ``on_end``."""
        self.record, self.lost, self.superseded_by = record, lost, superseded_by
        self.on_end(self)


def episode_group(
    job: str, config: EmbodiedJob, ticket: Ticket, episodes: Sequence[Episode], *, meta: dict[str, Any]
) -> EpisodeGroup:
    """Return the group of ended episodes. A lost episode is marked as failed and has no decisions.

    The group has no episodes if all of them are lost, or if the simulator began them in different states: such episodes
    are not comparable.
    """
    records = [episode.record for episode in episodes]
    lost = [episode.lost for episode in episodes if episode.record is None]
    first = next((record for record in records if record is not None), None)
    if first is None:
        return failed_episodes(job, config, ticket, {**meta, "error": lost[0] if lost else "no episodes"})
    kept = [record for record in records if record is not None]
    if starts := _unequal_starts(kept):
        return failed_episodes(job, config, ticket, {**meta, "error": starts.format(episodes[0].reset_id)})
    lengths = [0 if record is None else record.num_decisions for record in records]
    cuts = np.zeros(len(records) + 1, np.int32)
    np.cumsum(lengths, out=cuts[1:])

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(record, name) for record in kept])

    def last(name: str, like: NDArray[Any]) -> NDArray[Any]:
        blank = np.zeros_like(like)
        return np.stack([blank if record is None else record.final_observations[name] for record in records])

    spans, weights = _spans(records)
    facts = {**meta, "task": first.task, **({"error": lost[0]} if lost else {})}
    return EpisodeGroup(
        job=job,
        draw=ticket.draw,
        attempt=new_attempt(),
        epoch=ticket.epoch,
        cu_seqlens=cuts,
        observations={name: np.concatenate([each.observations[name] for each in kept]) for name in first.observations},
        final_observations={name: last(name, like) for name, like in first.final_observations.items()},
        actions=joined("actions"), logprobs=joined("logprobs"), valid=joined("valid"), rewards=joined("rewards"),
        terminated=joined("terminated"), truncated=joined("truncated"),
        returns=np.asarray([0.0 if record is None else record.total for record in records], np.float32),
        succeeded=np.asarray([record is not None and record.succeeded for record in records], np.bool_),
        solved_at_end=np.asarray([record is not None and record.solved_at_end for record in records], np.bool_),
        failed=np.asarray([record is None for record in records], np.bool_),
        spans=spans,
        weights=weights,
        reset_id=episodes[0].reset_id,
        state_hashes=np.asarray([0 if record is None else record.state_hash for record in records], np.uint64),
        objective="replay" if isinstance(config.algorithm, SoftActorCriticConfig) else "policy",
        meta=facts,
    )  # fmt: skip


def failed_episodes(job: str, config: EmbodiedJob, ticket: Ticket, meta: dict[str, Any]) -> EpisodeGroup:
    """Return a group without episodes, after an error. The coordinator then drops the ticket's draw (one attempt to get
    a group for a reset id) as 'failed', and makes a new draw for the same reset id."""
    C = config.environment.action_chunk
    return EpisodeGroup(
        job=job, draw=ticket.draw, attempt=new_attempt(), epoch=ticket.epoch, cu_seqlens=np.zeros(1, np.int32),
        observations={}, final_observations={}, actions=np.zeros((0, C, 1), np.float32),
        logprobs=np.zeros((0, C, 1), np.float32), valid=np.zeros(0, np.int32), rewards=np.zeros((0, C), np.float32),
        terminated=np.zeros((0, C), np.bool_), truncated=np.zeros((0, C), np.bool_), returns=np.zeros(0, np.float32),
        succeeded=np.zeros(0, np.bool_), solved_at_end=np.zeros(0, np.bool_), failed=np.zeros(0, np.bool_),
        spans=np.zeros((0, 4), np.int32), reset_id=config.environment.reset_id(ticket.draw.ordinal),
        state_hashes=np.zeros(0, np.uint64), meta=meta,
    )  # fmt: skip


def _unequal_starts(records: Sequence[Record]) -> str:
    """Return an error text if the episodes began in different states, else ''. The text has ``{}`` for the reset id."""
    starts = {record.state_hash for record in records}
    if len(starts) == 1:
        return ""
    return f"{UNEQUAL}: the {len(records)} episodes of reset id {{}} began in {len(starts)} different states"


def _spans(records: Sequence[Record | None]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    rows, weights = [], []
    for i, record in enumerate(records):
        if record is None:
            continue
        starts = [start for _, start in record.spans]
        for ((version, short), start), end in zip(record.spans, [*starts[1:], record.num_decisions], strict=True):
            rows.append([i, version, start, end])
            weights.append(short)
    return np.asarray(rows, np.int32).reshape(-1, 4), tuple(weights)
