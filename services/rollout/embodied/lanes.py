"""Lanes of one simulator session: the episode in each environment and its records. Does no I/O.

Shapes: B = lanes, n = lanes of one call, T = allocated decisions, C = actions of a decision, A = components of
an action, k = ended episodes, ... = the shape of one observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.services.rollout.embodied.engine import Decided
from penstock.services.rollout.embodied.episodes import Episode, Label, Record
from penstock.shared.protocol.embodied.environment import EnvSpec, ResetReply, StepReply

__all__ = ["Lanes"]

Rows = NDArray[np.int32]
"""Lane numbers, equal to the session's environment numbers."""
NOISE_BLOCK = 64
"""Number of decisions for which noise is generated at once."""
ANY_VERSION = -1
FIRST_LENGTH = 128
"""Number of decisions for which a lane initially allocates memory."""


class Lanes:
    """One lane for each environment of a session. A lane records its episode in one row of preallocated arrays [B, T,
    ...], one array for each field.

    Args:
        horizon: number of steps after which an episode is truncated.
        noise_shape: (C, A).
    """

    def __init__(self, spec: EnvSpec, *, horizon: int, noise_shape: tuple[int, int], action_dtype: str) -> None:
        B, (C, A) = spec.num_envs, noise_shape
        self._horizon, self._chunk = horizon, C
        self._episodes: list[Episode | None] = [None] * B
        self._spans: list[list[tuple[Label, int]]] = [[] for _ in range(B)]
        self._tasks = [""] * B
        self._hashes_B = np.zeros(B, np.uint64)
        self._running_B = np.zeros(B, np.bool_)
        self._succeeded_B = np.zeros(B, np.bool_)
        self._times_B = np.zeros(B, np.int64)
        """Number of decisions so far."""
        self._label: Label | None = None
        self._num_labels = 0
        self._versions_B = np.full(B, ANY_VERSION, np.int64)
        """Policy version that the episode requires, or ANY_VERSION."""
        self._label_numbers_B = np.zeros(B, np.int64)
        T = min(FIRST_LENGTH, -(-horizon // C))
        self._observations = {
            name: np.empty((B, T, *one.shape), np.dtype(one.dtype)) for name, one in spec.observations.items()
        }
        self._columns: dict[str, NDArray[Any]] = {
            "actions": np.empty((B, T, C, A), np.dtype(action_dtype)),
            "logprobs": np.empty((B, T, C, A), np.float32),
            "valid": np.empty((B, T), np.int32),
            "rewards": np.empty((B, T, C), np.float32),
            "terminated": np.empty((B, T, C), np.bool_),
            "truncated": np.empty((B, T, C), np.bool_),
        }
        self._noise_BNCA = np.empty((B, NOISE_BLOCK, C, A), np.float32)

    # -- episodes come and go ----------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of lanes without an episode."""
        return self._episodes.count(None)

    @property
    def num_running(self) -> int:
        """Number of lanes with an episode, including those not yet begun."""
        return len(self._episodes) - self.num_free

    def place(self, episodes: Sequence[Episode]) -> tuple[Rows, NDArray[np.int64]]:
        """Assign a free lane to each episode; return the lanes and reset ids for the reset request."""
        free = [lane for lane, episode in enumerate(self._episodes) if episode is None][: len(episodes)]
        assert len(free) == len(episodes), "more episodes than free lanes"
        for lane, episode in zip(free, episodes, strict=True):
            self._episodes[lane] = episode
        return np.asarray(free, np.int32), np.asarray([episode.reset_id for episode in episodes], np.int64)

    def began(self, rows: Rows, reply: ResetReply) -> None:
        """Record that the simulator has begun, or lost, the episodes of lanes ``rows``."""
        self._take_losses(rows, reply.lost, reply.reasons)
        kept = np.flatnonzero(~reply.lost)
        lanes = rows[kept]
        self._running_B[lanes] = True
        self._succeeded_B[lanes] = False
        self._times_B[lanes] = 0
        self._label_numbers_B[lanes] = 0
        self._hashes_B[lanes] = reply.state_hashes[kept]
        for i, lane in zip(kept.tolist(), lanes.tolist(), strict=True):
            episode = self._episodes[lane]
            assert episode is not None
            self._tasks[lane], self._spans[lane] = reply.tasks[i], []
            self._versions_B[lane] = ANY_VERSION if episode.version is None else episode.version
        for name, column in self._observations.items():
            column[lanes, 0] = reply.observations[name][kept]

    def lose(self, reason: str) -> None:
        """End all episodes as lost, because the session is lost."""
        for lane in range(len(self._episodes)):
            self._end(lane, lost=reason)

    def leave_unwanted(self) -> None:
        """Free the lanes of episodes that no ticket waits for."""
        for lane, episode in enumerate(self._episodes):
            if episode is not None and episode.unwanted:
                self._end(lane, lost="nobody waits for it")

    # -- decisions ---------------------------------------------------------------------------------------------------

    def to_decide(self) -> list[Rows]:
        """Return the running lanes in at most two groups: those that act with noise, and those that take the mean."""
        running = np.flatnonzero(self._running_B).astype(np.int32)
        noisy = np.asarray([self._noise_of(lane) for lane in running.tolist()], np.bool_)
        return [rows for rows in (running[noisy], running[~noisy]) if len(rows)]

    def inputs(self, rows: Rows) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32] | None]:
        """Return observations [n, ...] by name and noise [n, C, A] (None: mean) of one group of ``to_decide``."""
        times = self._times_B[rows]
        observations = {name: column[rows, times] for name, column in self._observations.items()}
        first = self._episodes[int(rows[0])]
        if first is None or first.noise is None:
            return observations, None
        for lane in rows[times % NOISE_BLOCK == 0].tolist():
            episode = self._episodes[lane]
            assert episode is not None
            assert episode.noise is not None
            self._noise_BNCA[lane] = episode.noise.next(NOISE_BLOCK)
        return observations, self._noise_BNCA[rows, times % NOISE_BLOCK]

    def decided(self, rows: Rows, decided: Decided) -> NDArray[np.bool_]:
        """Record decisions; return which of them to execute, bool [n].

        An episode that requires another version ends as superseded; one with a non-finite action ends as lost.
        """
        wanted_n = self._versions_B[rows]
        executed: NDArray[np.bool_] = (wanted_n == decided.version) | (wanted_n == ANY_VERSION)
        for lane in rows[~executed].tolist():
            self._end(lane, superseded_by=decided.version)
        if decided.actions_NCA.dtype.kind == "f":
            finite = np.isfinite(decided.actions_NCA).all(axis=(1, 2))
            for lane in rows[executed & ~finite].tolist():
                self._end(lane, lost=f"policy version {decided.version} gives an action that is not finite")
            executed &= finite
        lanes = rows[executed]
        times = self._times_B[lanes]
        self._columns["actions"][lanes, times] = decided.actions_NCA[executed]
        self._columns["logprobs"][lanes, times] = decided.logprobs_NCA[executed]
        self._mark(lanes, times, (decided.version, decided.weights))
        return executed

    def limits(self, rows: Rows) -> NDArray[np.int64]:
        """Return, for each lane, how many actions of its decision it can execute before the horizon, [n]."""
        return np.minimum(self._chunk, self._horizon - self._times_B[rows] * self._chunk)

    def stepped(self, rows: Rows, reply: StepReply) -> None:
        """Record the simulator's results for the decisions of lanes ``rows``, and end finished episodes."""
        bad = ~np.isfinite(reply.rewards).all(axis=1)
        self._take_losses(rows, reply.lost, reply.reasons)
        self._take_losses(rows, bad & ~reply.lost, ["a reward is not finite"] * len(rows))
        lost = reply.lost | bad
        kept = np.flatnonzero(~lost)
        lanes, times = rows[kept], self._times_B[rows[kept]]
        size = reply.rewards.shape[1]
        for name in ("rewards", "terminated", "truncated"):
            column = self._columns[name]
            if size < self._chunk:
                column[lanes, times] = 0
            column[lanes, times, :size] = getattr(reply, name)[kept]
        self._columns["valid"][lanes, times] = reply.valid[kept]
        self._succeeded_B[lanes] |= reply.success[kept].any(axis=1)
        self._times_B[lanes] += 1
        cut = ~reply.ended[kept] & (self._times_B[lanes] * self._chunk >= self._horizon)
        self._columns["truncated"][lanes[cut], times[cut], reply.valid[kept[cut]] - 1] = True
        over = reply.ended[kept] | cut
        self._write_next(lanes[~over], kept[~over], reply)
        finals = np.cumsum(reply.ended) - 1  # index of an ended row among the final observations
        for i, lane in zip(kept[over].tolist(), lanes[over].tolist(), strict=True):
            last = (
                {name: array[finals[i]] for name, array in reply.final_observations.items()}
                if reply.ended[i]
                else {name: array[i] for name, array in reply.observations.items()}
            )
            solved = bool(reply.success[i, int(reply.valid[i]) - 1])
            self._end(lane, record=self._record(lane, last, solved_at_end=solved))

    # -- one lane ----------------------------------------------------------------------------------------------------

    def _noise_of(self, lane: int) -> bool:
        episode = self._episodes[lane]
        return episode is not None and episode.noise is not None

    def _mark(self, lanes: Rows, times: NDArray[np.int64], label: Label) -> None:
        """Record which weights make the decisions of ``lanes``: from index ``times[i]`` on, lane ``lanes[i]`` uses the
        weights with the label ``label``. Skip lanes whose previous decision came from the same weights."""
        if self._label != label:
            self._label, self._num_labels = label, self._num_labels + 1
        fresh = np.flatnonzero(self._label_numbers_B[lanes] != self._num_labels)
        for i in fresh.tolist():
            self._spans[int(lanes[i])].append((label, int(times[i])))
        self._label_numbers_B[lanes] = self._num_labels

    def _write_next(self, lanes: Rows, places: NDArray[np.int64], reply: StepReply) -> None:
        """Store the observations of the next decision. If an episode has more decisions than the arrays have room for,
        double T."""
        times = self._times_B[lanes]
        for columns in (self._observations, self._columns):
            for name, column in columns.items():
                if len(times) and int(times.max()) == column.shape[1]:
                    columns[name] = np.concatenate([column, np.empty_like(column)], axis=1)
        for name, column in self._observations.items():
            column[lanes, times] = reply.observations[name][places]

    def _take_losses(self, rows: Rows, lost: NDArray[np.bool_], reasons: Sequence[str]) -> None:
        for i in np.flatnonzero(lost).tolist():
            self._end(int(rows[i]), lost=reasons[i] or "the simulator lost it")

    def _record(self, lane: int, final: dict[str, NDArray[Any]], *, solved_at_end: bool) -> Record:
        D = int(self._times_B[lane])
        return Record(
            observations={name: column[lane, :D].copy() for name, column in self._observations.items()},
            final_observations={name: array.copy() for name, array in final.items()},
            **{name: column[lane, :D].copy() for name, column in self._columns.items()},
            succeeded=bool(self._succeeded_B[lane]),
            solved_at_end=solved_at_end,
            spans=self._spans[lane],
            state_hash=int(self._hashes_B[lane]),
            task=self._tasks[lane],
        )

    def _end(
        self, lane: int, *, record: Record | None = None, lost: str = "", superseded_by: int | None = None
    ) -> None:
        episode, self._episodes[lane] = self._episodes[lane], None
        self._running_B[lane] = False
        if episode is not None:
            episode.end(record=record, lost=lost, superseded_by=superseded_by)
