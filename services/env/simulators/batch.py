"""Runs the environments of a child process in one object that simulates all of them together.

``child.py`` loads this file if the adapter has ``make_batch(env_id, options, num_envs)`` and this function returns a
``BatchedEnvironment``; with None, each environment is an object of its own. Like the adapters, this file imports only
the standard library and NumPy.

An error of such an object concerns all its environments: their episodes are lost, and the next reset creates the object
again. An observation that is not finite loses only the episode that it belongs to.

Shapes: N = environments of the object, n = environments of one call, C = actions of a chunk.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # an interpreter of simulators does not have the package
    from penstock.services.env.simulators.interfaces import BatchedEnvironment, Message, Values

__all__ = ["Batch", "Row"]

MAX_REASON = 2000
"""Maximum characters of an error message to the client; the log has the whole message."""


class Batch:
    """The environments of a process in one ``BatchedEnvironment``, which is created again after an error.

    Args:
        make: creates the object.
        first: the object to begin with.
        num_envs: N.
    """

    def __init__(self, make: Callable[[], BatchedEnvironment], first: BatchedEnvironment, num_envs: int) -> None:
        self._make = make
        self._inner: Any = first
        self.spec: Message = first.spec
        self._running_N = np.zeros(num_envs, np.bool_)
        """True for each environment whose state the object holds."""
        self._why = ""
        """Error for which the object was closed last."""

    @property
    def task(self) -> str:
        """Description of the task."""
        return str(self._opened().task)

    def row(self, env: int) -> Row:
        """Return a view of one environment."""
        return Row(self, env)

    def begin(
        self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]
    ) -> tuple[Mapping[str, NDArray[Any]], Sequence[bytes]]:
        """Begin episodes; return their first observations [n, ...] by name, and n states.

        If the object raises, close it and raise its error.
        """
        try:
            inner = self._opened()
            found = inner.reset(env_ids, state_ids), inner.states(env_ids)
        except (Exception, SystemExit) as error:  # a simulator may raise anything
            self._break(error)
            raise
        self._running_N[env_ids] = True
        return found

    def play(
        self,
        env_ids: NDArray[np.int32],
        actions: NDArray[Any],
        current: Mapping[str, NDArray[Any]],
        rewards: NDArray[np.float32],
        flags: Sequence[NDArray[np.bool_]],
    ) -> tuple[NDArray[np.int32], dict[int, str]]:
        """Execute chunks [n, C, ...], the actions of all environments together; an environment stops where its episode
        ends.

        Writes rewards and flags [n, C], and the last observations into the environments' rows of ``current``. Returns
        the number of executed actions [n] of episodes that have ended, 0 for the others, and the reasons of lost
        episodes by row of the request.
        """
        executed = np.zeros(len(env_ids), np.int32)
        lost = {i: why for i, env in enumerate(env_ids.tolist()) if (why := self.why_lost(env))}
        rows = np.flatnonzero(self._running_N[env_ids])
        num_actions = actions.shape[1]
        for c in range(num_actions):
            if not len(rows):
                break
            try:
                observations, earned, *results = self._inner.step(env_ids[rows], actions[rows, c])
                rewards[rows, c] = earned
                for flag, values in zip(flags, results, strict=True):
                    flag[rows, c] = values
                over = np.asarray(results[0] | results[1])
                shown = np.ones_like(over) if c == num_actions - 1 else over
                for name, array in current.items():
                    array[env_ids[rows[shown]]] = observations[name][shown]
            except (Exception, SystemExit) as error:  # a simulator may raise anything
                self._break(error)
                lost.update(dict.fromkeys(rows.tolist(), self._why))
                break
            executed[rows[over]] = c + 1
            rows = rows[~over]
        return executed, lost

    def why_lost(self, env: int) -> str:
        """Return why the episode of one environment is lost; '' if it is not."""
        return "" if self._running_N[env] else f"the simulator of all environments broke: {self._why}"

    def snapshot(self, env: int) -> Values:
        """Return the snapshot of one environment."""
        values: Values = self._inner.snapshot(env)
        return values

    def restore(self, env: int, values: Values) -> None:
        """Continue one environment from a snapshot."""
        self._opened().restore(env, values)
        self._running_N[env] = True

    def state(self, env: int) -> bytes:
        """Return the state of one environment."""
        (state,) = self._opened().states(np.array([env], np.int32))
        return bytes(state)

    def leave(self, env: int) -> None:
        """Forget the episode of one environment."""
        self._running_N[env] = False

    def close(self) -> None:
        """Close the object."""
        inner, self._inner = self._inner, None
        self._running_N[:] = False
        if inner is not None:
            with contextlib.suppress(Exception):
                inner.close()

    def _opened(self) -> Any:
        if self._inner is None:
            self._inner = self._make()
        return self._inner

    def _break(self, error: BaseException) -> None:
        """Close the object, which raised ``error`` and whose state is therefore unknown."""
        traceback.print_exception(error)
        self._why = f"{type(error).__name__}: {error}"[:MAX_REASON]
        self.close()


class Row:
    """One environment of a ``Batch``, for requests to single environments."""

    def __init__(self, batch: Batch, env: int) -> None:
        self._batch, self._env = batch, env
        self.spec = batch.spec

    @property
    def task(self) -> str:
        """Description of the task."""
        return self._batch.task

    def state(self) -> bytes:
        """Return the state of the environment."""
        return self._batch.state(self._env)

    def snapshot(self) -> Values:
        """Return the values that determine the rest of the episode."""
        return self._batch.snapshot(self._env)

    def restore(self, values: Values) -> None:
        """Continue from a snapshot."""
        self._batch.restore(self._env, values)

    def close(self) -> None:
        """Forget the episode; the other environments go on."""
        self._batch.leave(self._env)
