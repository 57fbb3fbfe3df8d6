"""Episode statistics of one session: ids, returns, lengths and successes. Pure: no bus, clock or threads."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.services.env.simulators import Chunk, Simulator, Started, Stepping
from penstock.shared.errors import Conflict, ProtocolError, Unsupported
from penstock.shared.protocol.embodied.environment import (
    FilmReply,
    FilmRequest,
    ResetReply,
    ResetRequest,
    RestoreRequest,
    SnapshotReply,
    SnapshotRequest,
    StepReply,
    StepRequest,
)

__all__ = ["BegunStep", "EnvPool"]

STATE_HEADER = struct.Struct("<4sqdi?")
"""Header of a snapshot: format, state id, return, length and success of the episode so far. The simulator's own
snapshot follows."""
FORMAT = b"PSN1"


@dataclass(frozen=True, slots=True, eq=False)
class BegunStep:
    """A step that the simulator is executing. ``following`` [n]: state id of the next episode in each environment, in
    case the current episode ends."""

    request: StepRequest
    following: NDArray[np.int64]
    stepping: Stepping


class EnvPool:
    """Tracks the current episode of each of a simulator's B environments."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        B = simulator.spec.num_envs
        self._running_B = np.zeros(B, np.bool_)
        self._state_ids_B = np.zeros(B, np.int64)
        self._episode_ids_B = np.full(B, -1, np.int64)
        self._returns_B = np.zeros(B, np.float64)
        self._lengths_B = np.zeros(B, np.int32)
        self._succeeded_B = np.zeros(B, np.bool_)
        self._restored_B = np.zeros(B, np.bool_)
        """True for each environment whose episode was restored from a snapshot, which other episodes may continue,
        too."""
        self.num_steps = 0
        self.num_episodes = 0
        """Number of episodes started."""
        self.num_ended = 0
        self.num_lost = 0
        """Number of episodes that the simulator failed to begin or complete."""

    def reset(self, request: ResetRequest) -> ResetReply:
        """Start new episodes; running episodes of these environments are abandoned.

        Raises:
            ProtocolError: environment ids or state ids are invalid.
        """
        env_ids = self._checked_ids(request.env_ids)
        if request.state_ids.shape != env_ids.shape or (request.state_ids < 0).any():
            raise ProtocolError("state_ids: one number from 0 per environment is needed")
        started = self._simulator.reset(env_ids, request.state_ids)
        return self._started(request, request.state_ids, started)

    def step(self, request: StepRequest) -> StepReply:
        """Execute a chunk of actions. Each environment stops when its episode ends.

        Raises:
            ProtocolError: environment ids, state ids or actions are invalid; nothing was stepped.
            Conflict: an episode has ended and was not reset; nothing was stepped.
        """
        return self.finish_step(self.begin_step(request))

    def begin_step(self, request: StepRequest) -> BegunStep:
        """Begin a ``step`` without waiting for its result; next, call ``finish_step``. Raises the same errors as
        ``step``."""
        env_ids = self._checked_ids(request.env_ids)
        actions = self._checked_actions(request.actions, len(env_ids))
        self._check_running(env_ids)
        following = self._next_states(request, env_ids)
        stepping = self._simulator.begin_step(env_ids, actions, following if request.auto_reset else None)
        return BegunStep(request, following, stepping)

    def finish_step(self, begun: BegunStep) -> StepReply:
        """Wait for the simulator, and return the reply."""
        request, env_ids, following = begun.request, begun.request.env_ids, begun.following
        chunk = self._simulator.finish_step(begun.stepping)
        reply = self._record(request, chunk)
        if request.auto_reset:
            fresh = reply.ended & ~_mask(chunk.not_started, len(env_ids))
            self._begin(env_ids[fresh], following[fresh])
            reply.next_episode_ids[:] = self._episode_ids_B[env_ids]
        return reply

    def snapshot(self, request: SnapshotRequest) -> SnapshotReply:
        """Return snapshots of running episodes; the episodes continue.

        Raises:
            Unsupported: the simulator has no snapshots.
            ProtocolError: environment ids are invalid.
            Conflict: an episode has ended and was not reset.
        """
        self._check_snapshots()
        env_ids = self._checked_ids(request.env_ids)
        self._check_running(env_ids)
        stored = self._simulator.snapshot(env_ids)
        lost = _mask(stored.lost, len(env_ids))
        headers = [
            STATE_HEADER.pack(
                FORMAT, self._state_ids_B[e], self._returns_B[e], self._lengths_B[e], self._succeeded_B[e]
            )
            for e in env_ids.tolist()
        ]
        found = [
            b"" if gone else header + data for gone, header, data in zip(lost, headers, stored.snapshots, strict=True)
        ]
        self._lose(env_ids[lost])
        return SnapshotReply(
            seq=request.seq,
            snapshots=np.frombuffer(b"".join(found), np.uint8),
            sizes=np.asarray([len(data) for data in found], np.int64),
            lost=lost,
            reasons=_reasons(len(env_ids), stored.lost),
        )

    def restore(self, request: RestoreRequest) -> ResetReply:
        """Continue episodes from snapshots, as new episodes; running episodes of the environments are abandoned.

        Raises:
            Unsupported: the simulator has no snapshots.
            ProtocolError: environment ids are invalid, or a snapshot is damaged or from other environments. After an
                invalid snapshot the environments must be reset.
        """
        self._check_snapshots()
        env_ids = self._checked_ids(request.env_ids)
        parts = _parts(request, len(env_ids))
        headers = [STATE_HEADER.unpack_from(part) for part in parts]
        if any(header[0] != FORMAT for header in headers):
            raise ProtocolError("snapshots: this is none, or one of another version")
        self._running_B[env_ids] = False
        started = self._simulator.restore(env_ids, [part[STATE_HEADER.size :] for part in parts])
        reply = self._started(request, np.asarray([header[1] for header in headers], np.int64), started)
        kept = np.flatnonzero(~reply.lost)
        self._restored_B[env_ids[kept]] = True
        for columns, place in ((self._returns_B, 2), (self._lengths_B, 3), (self._succeeded_B, 4)):
            columns[env_ids[kept]] = [headers[i][place] for i in kept.tolist()]
        return reply

    def film(self, request: FilmRequest) -> FilmReply:
        """Return the video of an environment's newest episode. Raises ProtocolError if there is no such environment."""
        self._checked_ids(np.array([request.env_id], np.int32))
        data, reason = self._simulator.film(request.env_id)
        return FilmReply(seq=request.seq, film=np.frombuffer(data, np.uint8), reasons=[reason] if reason else [])

    def _started(
        self, request: ResetRequest | RestoreRequest, state_ids: NDArray[np.int64], started: Started
    ) -> ResetReply:
        """Record which episodes the simulator began or lost, and return the reply."""
        env_ids = request.env_ids
        lost = _mask(started.lost, len(env_ids))
        self._begin(env_ids[~lost], state_ids[~lost])
        self._lose(env_ids[lost])
        return ResetReply(
            seq=request.seq,
            observations=started.observations if request.observe else {},
            episode_ids=self._episode_ids_B[env_ids],
            state_hashes=started.state_hashes,
            tasks=started.tasks,
            lost=lost,
            reasons=_reasons(len(env_ids), started.lost),
        )

    def _record(self, request: StepRequest, chunk: Chunk) -> StepReply:
        """Record the results of a chunk, before the next episodes begin, and return the reply."""
        env_ids = request.env_ids
        n = len(env_ids)
        broken, unstarted = _mask(chunk.lost, n), _mask(chunk.not_started, n)
        ended = (chunk.terminated | chunk.truncated).any(axis=1) & ~broken
        kept = ~broken
        self._returns_B[env_ids[kept]] += chunk.rewards[kept].sum(axis=1, dtype=np.float64)
        self._lengths_B[env_ids[kept]] += chunk.valid[kept]
        self._succeeded_B[env_ids[kept]] |= chunk.success[kept].any(axis=1)
        self._running_B[env_ids[ended]] = False
        self.num_steps += int(chunk.valid.sum())
        self.num_ended += int(ended.sum())
        reply = StepReply(
            seq=request.seq,
            observations=chunk.observations if request.observe else {},
            rewards=chunk.rewards,
            terminated=chunk.terminated,
            truncated=chunk.truncated,
            success=chunk.success,
            valid=chunk.valid,
            ended=ended,
            lost=broken | unstarted,
            reasons=_reasons(n, chunk.not_started | chunk.lost),
            final_observations=chunk.look(ended, final=True),
            state_ids=self._state_ids_B[env_ids],
            episode_ids=self._episode_ids_B[env_ids],
            next_episode_ids=self._episode_ids_B[env_ids],
            returns=self._returns_B[env_ids].astype(np.float32),
            lengths=self._lengths_B[env_ids],
            succeeded=self._succeeded_B[env_ids],
            state_hashes=chunk.state_hashes,
            tasks=chunk.tasks,
        )
        self._lose(env_ids[broken | unstarted])
        return reply

    def _begin(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> None:
        self._running_B[env_ids] = True
        self._state_ids_B[env_ids] = state_ids
        self._episode_ids_B[env_ids] = self.num_episodes + np.arange(len(env_ids))
        self._returns_B[env_ids] = 0
        self._lengths_B[env_ids] = 0
        self._succeeded_B[env_ids] = False
        self._restored_B[env_ids] = False
        self.num_episodes += len(env_ids)

    def _lose(self, env_ids: NDArray[np.int32]) -> None:
        self._running_B[env_ids] = False
        self.num_lost += len(env_ids)

    def _next_states(self, request: StepRequest, env_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the state ids of the episodes that begin after ended ones: those in the request, else the current ids
        plus the number of environments."""
        if not len(request.next_state_ids):
            if request.auto_reset and self._restored_B[env_ids].any():
                raise ProtocolError("next_state_ids: needed after a restore, because episodes may share a snapshot")
            return self._state_ids_B[env_ids] + self._simulator.spec.num_envs
        if request.next_state_ids.shape != env_ids.shape or (request.next_state_ids < 0).any():
            raise ProtocolError("next_state_ids: one number from 0 per environment is needed, or none at all")
        return request.next_state_ids

    def _checked_ids(self, env_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        B, numbers = self._simulator.spec.num_envs, set(env_ids.ravel().tolist())
        if env_ids.ndim != 1 or not numbers or len(numbers) != len(env_ids):
            raise ProtocolError("env_ids: a list of different environments is needed")
        if min(numbers) < 0 or max(numbers) >= B:
            raise ProtocolError(f"env_ids: this session has the environments 0..{B - 1}")
        return env_ids

    def _checked_actions(self, actions: NDArray[Any], n: int) -> NDArray[Any]:
        spec = self._simulator.spec
        shape = f"[{n}, C{''.join(f', {size}' for size in spec.action_shape)}]"
        if actions.ndim < 2 or len(actions) != n or not actions.shape[1] or actions.shape[2:] != spec.action_shape:
            raise ProtocolError(f"actions have the shape {list(actions.shape)}; {spec.env_id} needs {shape}")
        if actions.dtype != np.dtype(spec.action_dtype):
            raise ProtocolError(f"actions are {actions.dtype}; {spec.env_id} needs {spec.action_dtype}")
        if spec.num_actions is None:
            if not np.isfinite(actions).all():
                raise ProtocolError(f"{spec.env_id}: an action is not finite")
        elif actions.min() < 0 or actions.max() >= spec.num_actions:
            raise ProtocolError(f"{spec.env_id}: actions must lie in 0..{spec.num_actions - 1}")
        return actions

    def _check_snapshots(self) -> None:
        spec = self._simulator.spec
        if not spec.has_snapshots:
            raise Unsupported(f"'{spec.env_id}' of {spec.backend} has no snapshots")

    def _check_running(self, env_ids: NDArray[np.int32]) -> None:
        over = env_ids[~self._running_B[env_ids]]
        if len(over):
            raise Conflict(f"environments {over.tolist()} have no running episode: reset them first")


def _parts(request: RestoreRequest, n: int) -> list[bytes]:
    """Return the ``n`` snapshots of a request. Raises ProtocolError if ``request.sizes`` does not fit its data."""
    data, sizes = request.snapshots, request.sizes
    total = sum(sizes.ravel().tolist())  # of Python, whose numbers do not wrap around
    if data.ndim != 1 or sizes.shape != (n,) or sizes.min() < STATE_HEADER.size or total != data.size:
        raise ProtocolError("sizes: the length of one snapshot per environment is needed")
    return [part.tobytes() for part in np.split(data, np.cumsum(sizes)[:-1])]


def _reasons(n: int, places: dict[int, str]) -> list[str]:
    return [places.get(i, "") for i in range(n)] if places else [""] * n


def _mask(places: dict[int, str], n: int) -> NDArray[np.bool_]:
    mask = np.zeros(n, np.bool_)
    if places:
        mask[list(places)] = True
    return mask
