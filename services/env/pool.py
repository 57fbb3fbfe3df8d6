"""The environments of one session: chunks, episode books, automatic resets. No bus, no clock, no threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.services.env.simulators.base import Simulator
from penstock.shared.errors import Conflict, ProtocolError
from penstock.shared.protocol.environment import ResetReply, ResetRequest, StepReply, StepRequest

__all__ = ["EnvPool"]


class EnvPool:
    """Keeps the episode of each of the B environments of a simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        B = simulator.spec.num_envs
        self._running_B = np.zeros(B, np.bool_)
        self._state_ids_B = np.zeros(B, np.int64)
        self._episode_ids_B = np.full(B, -1, np.int64)
        self._returns_B = np.zeros(B, np.float64)
        self._lengths_B = np.zeros(B, np.int32)
        self.num_steps = 0
        self.num_episodes = 0
        """Episodes started."""
        self.num_ended = 0

    def reset(self, request: ResetRequest) -> ResetReply:
        """Start new episodes; running ones are given up.

        Raises:
            ProtocolError: ids that do not fit.
        """
        env_ids = self._checked_ids(request.env_ids)
        if request.state_ids.shape != env_ids.shape or (request.state_ids < 0).any():
            raise ProtocolError("state_ids: one number from 0 per environment is needed")
        observations = self._start(env_ids, request.state_ids)
        return ResetReply(
            seq=request.seq,
            observations=observations,
            episode_ids=self._episode_ids_B[env_ids],
            state_hashes=np.asarray([xxhash.xxh3_64_intdigest(o.tobytes()) for o in observations], np.uint64),
        )

    def step(self, request: StepRequest) -> StepReply:
        """Execute a chunk of actions; an environment stops at its first end.

        Raises:
            ProtocolError: ids or actions that do not fit.
            Conflict: an episode is over and was not reset. In either case nothing was stepped.
        """
        env_ids = self._checked_ids(request.env_ids)
        actions = self._checked_actions(request.actions, len(env_ids))
        self._check_running(env_ids)
        next_state_ids = self._next_states(request, env_ids)
        n, C = actions.shape[:2]
        rewards, valid = np.zeros((n, C), np.float32), np.zeros(n, np.int32)
        terminated, truncated = np.zeros((n, C), np.bool_), np.zeros((n, C), np.bool_)
        observations = np.zeros((n, *self._simulator.spec.observation_shape), self._simulator.spec.observation_dtype)
        active = np.arange(n)
        for c in range(C):
            result = self._simulator.step(env_ids[active], actions[active, c])
            observations[active], rewards[active, c] = result.observations, result.rewards
            terminated[active, c], truncated[active, c] = result.terminated, result.truncated
            valid[active] += 1
            active = active[~(result.terminated | result.truncated)]
            if not len(active):
                break
        ended = np.asarray((terminated | truncated).any(axis=1))
        self._book(env_ids, rewards, valid, ended)
        state_ids, episode_ids = self._state_ids_B[env_ids], self._episode_ids_B[env_ids]
        returns, lengths = self._returns_B[env_ids].astype(np.float32), self._lengths_B[env_ids]
        final_observations = observations[ended]
        if request.auto_reset and ended.any():
            observations[ended] = self._start(env_ids[ended], next_state_ids[ended])
        return StepReply(
            seq=request.seq,
            observations=observations,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            ended=ended,
            final_observations=final_observations,
            state_ids=state_ids,
            episode_ids=episode_ids,
            next_episode_ids=self._episode_ids_B[env_ids],
            returns=returns,
            lengths=lengths,
        )

    def _start(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> NDArray[Any]:
        observations = self._simulator.reset(env_ids, state_ids)
        self._running_B[env_ids] = True
        self._state_ids_B[env_ids] = state_ids
        self._episode_ids_B[env_ids] = self.num_episodes + np.arange(len(env_ids))
        self._returns_B[env_ids] = 0
        self._lengths_B[env_ids] = 0
        self.num_episodes += len(env_ids)
        return observations

    def _book(
        self,
        env_ids: NDArray[np.int32],
        rewards: NDArray[np.float32],
        valid: NDArray[np.int32],
        ended: NDArray[np.bool_],
    ) -> None:
        self._returns_B[env_ids] += rewards.sum(axis=1, dtype=np.float64)
        self._lengths_B[env_ids] += valid
        self._running_B[env_ids[ended]] = False
        self.num_steps += int(valid.sum())
        self.num_ended += int(ended.sum())

    def _next_states(self, request: StepRequest, env_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """State ids after an automatic reset; by default each environment goes on in strides of B: never two alike."""
        if not len(request.next_state_ids):
            return self._state_ids_B[env_ids] + self._simulator.spec.num_envs
        if request.next_state_ids.shape != env_ids.shape or (request.next_state_ids < 0).any():
            raise ProtocolError("next_state_ids: one number from 0 per environment is needed, or none at all")
        return request.next_state_ids

    def _checked_ids(self, env_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        B = self._simulator.spec.num_envs
        if env_ids.ndim != 1 or not len(env_ids) or len(np.unique(env_ids)) != len(env_ids):
            raise ProtocolError("env_ids: a list of different environments is needed")
        if env_ids.min() < 0 or env_ids.max() >= B:
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

    def _check_running(self, env_ids: NDArray[np.int32]) -> None:
        over = env_ids[~self._running_B[env_ids]]
        if len(over):
            raise Conflict(f"environments {over.tolist()} have no running episode: reset them first")
