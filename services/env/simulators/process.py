"""Environments in child processes, which may use another interpreter, hang, crash or be killed.

The B environments of a session are divided over its processes, which step in parallel. A process that exceeds the time
limit is killed. The episodes of a killed or dead process are lost; the next reset of its environments starts a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.services.env.simulators.base import Chunk, Named, Started, Stepping, Stored
from penstock.services.env.simulators.child import Channel, Message, SharedObservations
from penstock.shared.errors import ConfigError, ProtocolError, Unavailable
from penstock.shared.protocol.embodied.environment import ArraySpec, EnvSpec, ObservationMemory, OpenEnv

__all__ = ["ProcessSimulator"]

CHILD = Path(__file__).with_name("child.py")
OPEN_LIMIT_S = 180.0
"""Timeout to create environments; importing a simulator's libraries alone may take many seconds."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals that fix the size of the memory of observations: if a process shrank the memory, its readers would be
killed."""
CLOSE_LIMIT_S = 2.0
"""Time that children get to exit before they are killed."""


class ProcessSimulator:
    """The environments of one session, in one or several child processes.

    Args:
        request: the client's request to open the session.
        python: interpreter in which the simulator is installed.
        backend: path of the adapter.
        limit_s: timeout of one request; a child that takes longer counts as hung.

    Raises:
        ConfigError: the interpreter does not start, or the environments cannot be created, with the reason.
    """

    def __init__(self, request: OpenEnv, *, python: str, backend: Path, limit_s: float) -> None:
        self._request, self._python, self._backend, self._limit_s = request, python, backend, limit_s
        num_processes = max(1, min(request.num_processes, request.num_envs))
        bounds = [round(i * request.num_envs / num_processes) for i in range(num_processes + 1)]
        self._first = bounds[:-1]
        self._sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        self._everyone = np.arange(request.num_envs, dtype=np.int32).tobytes()
        self._children: list[_Child | None] = [None] * num_processes
        self._why: list[str] = [""] * num_processes
        """Reason why each process ended; '' while it runs."""
        try:
            for number in range(num_processes):  # start all before waiting for the first
                self._children[number] = self._launch(number)
            specs = [child.opened(OPEN_LIMIT_S) for child in self._children if child is not None]
            self.spec = _spec_of(request, specs[0])
            self._memory = _SharedMemory(specs[0]["observations"], request.num_envs)
        except BaseException:
            self._end_processes()
            raise
        try:
            for child, first, spec in zip(self._children, self._first, specs, strict=True):
                assert child is not None
                child.share(self._memory, first, spec)
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> ObservationMemory:
        """Memory of the current observations; see ``Simulator.memory``."""
        return self._memory.description

    def described(self) -> EnvSpec:
        """Return the current spec, which an episode may have changed; see ``Simulator.described``."""
        lost: dict[int, str] = {}
        found = self._ask_one({"kind": "describe"}, np.zeros(1, np.int32), 0, [], lost)
        return self.spec if found is None else _spec_of(self._request, found[0]["spec"])

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> Started:
        """Start episodes; see ``Simulator.reset``. Processes that ended are started again."""
        lost: dict[int, str] = {}
        hashes, tasks = np.zeros(len(env_ids), np.uint64), [""] * len(env_ids)
        for number in self._numbers(env_ids):
            self._revive(number)
        for places, header, arrays in self._ask({"kind": "reset"}, env_ids, [state_ids], lost):
            hashes[places] = arrays[0]
            for place, task in zip(places.tolist(), header["tasks"], strict=True):
                tasks[place] = task
            lost.update(_at(places, header["lost"]))
        return Started(look=partial(self._look, env_ids), state_hashes=hashes, tasks=tasks, lost=lost)

    def step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any], next_state_ids: NDArray[np.int64] | None
    ) -> Chunk:
        """Execute a chunk of actions; see ``Simulator.step``."""
        return self.finish_step(self.begin_step(env_ids, actions, next_state_ids))

    def begin_step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any], next_state_ids: NDArray[np.int64] | None
    ) -> Stepping:
        """Send a chunk of actions to the processes; see ``Simulator.begin_step``."""
        following = np.zeros(0, np.int64) if next_state_ids is None else next_state_ids
        return self._send({"kind": "step"}, env_ids, [actions, following])

    def finish_step(self, stepping: Stepping) -> Chunk:
        """Wait for the results of a chunk and return them; see ``Simulator.finish_step``."""
        assert isinstance(stepping, _Asked)
        env_ids, lost = stepping.env_ids, stepping.lost
        n, C = stepping.arrays[0].shape[:2]
        answers = self._collect(stepping)
        if len(answers) == 1 and len(answers[0][0]) == n:  # one process has executed all of it
            columns = answers[0][2]
        else:
            columns = [np.zeros((n, C), dtype) for dtype in (np.float32, np.bool_, np.bool_, np.bool_)]
            columns += [np.zeros(n, np.int32), np.zeros(n, np.uint64)]
            for places, _, arrays in answers:
                for column, part in zip(columns, arrays, strict=True):
                    column[places] = part
        tasks, not_started = [""] * n, dict[int, str]()
        for places, header, _ in answers:
            for place, task in zip(places.tolist(), header["tasks"], strict=False):  # none if no episode began
                tasks[place] = task
            lost.update(_at(places, header["lost"]))
            not_started.update(_at(places, header["not_started"]))
        rewards, terminated, truncated, success, valid, hashes = columns
        return Chunk(
            look=partial(self._look, env_ids),
            rewards=rewards, terminated=terminated, truncated=truncated, success=success, valid=valid,
            state_hashes=hashes, tasks=tasks, lost=lost, not_started=not_started,
        )  # fmt: skip

    def snapshot(self, env_ids: NDArray[np.int32]) -> Stored:
        """Store running episodes; see ``Simulator.snapshot``."""
        snapshots, lost = [b""] * len(env_ids), dict[int, str]()
        for i in range(len(env_ids)):
            found = self._ask_one({"kind": "snapshot"}, env_ids, i, [], lost)
            if found is not None:
                snapshots[i] = found[1][0].tobytes()
        return Stored(snapshots=snapshots, lost=lost)

    def restore(self, env_ids: NDArray[np.int32], snapshots: Sequence[bytes]) -> Started:
        """Continue stored episodes; see ``Simulator.restore``. Processes that ended are started again."""
        lost: dict[int, str] = {}
        hashes, tasks = np.zeros(len(env_ids), np.uint64), [""] * len(env_ids)
        for number in self._numbers(env_ids):
            self._revive(number)
        for i, snapshot in enumerate(snapshots):
            found = self._ask_one({"kind": "restore"}, env_ids, i, [np.frombuffer(snapshot, np.uint8)[None]], lost)
            if found is not None:
                hashes[i], tasks[i] = found[1][0][0], found[0]["tasks"][0]
        for number in self._numbers(env_ids):  # rows that were restored before their process died
            if self._children[number] is None:
                places = self._places(env_ids, number)
                lost.update(dict.fromkeys(places.tolist(), self._why[number]))
                hashes[places] = 0
        return Started(look=partial(self._look, env_ids), state_hashes=hashes, tasks=tasks, lost=lost)

    def film(self, env_id: int) -> tuple[bytes, str]:
        """Return the film of an environment's newest episode; see ``Simulator.film``."""
        lost: dict[int, str] = {}
        for _, header, arrays in self._ask({"kind": "film"}, np.array([env_id], np.int32), [], lost):
            return arrays[0].tobytes(), header["reason"]
        return b"", lost[0]

    def close(self) -> None:
        """Ask all processes to exit, and kill those that do not."""
        try:
            self._end_processes()
        finally:
            self._memory.close()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _end_processes(self) -> None:
        children = [child for child in self._children if child is not None]
        self._children = [None] * len(self._children)
        for child in children:
            child.hang_up()
        until = time.monotonic() + CLOSE_LIMIT_S
        for child in children:
            child.end(max(0.0, until - time.monotonic()))

    def _launch(self, number: int) -> _Child:
        return _Child(self._python, self._backend, self._request, self._sizes[number])

    def _revive(self, number: int) -> None:
        """Start a process again if it ended. Raises Unavailable if it does not start."""
        if self._children[number] is not None:
            return
        child = self._launch(number)
        try:
            child.share(self._memory, self._first[number], child.opened(OPEN_LIMIT_S))
        except ConfigError as error:
            raise Unavailable(
                f"the simulator of '{self._request.env_id}' broke ({self._why[number]}) and does not start: {error}"
            ) from None
        self._children[number] = child

    def _ask(
        self, header: Message, env_ids: NDArray[np.int32], arrays: Sequence[NDArray[Any]], lost: dict[int, str]
    ) -> list[tuple[NDArray[np.int64], Message, list[NDArray[Any]]]]:
        """Send each process its rows of a request and collect the replies; rows of dead processes go to ``lost``."""
        asked = self._send(header, env_ids, arrays)
        answers = self._collect(asked)
        lost.update(asked.lost)
        return answers

    def _send(self, header: Message, env_ids: NDArray[np.int32], arrays: Sequence[NDArray[Any]]) -> _Asked:
        """Send each process its rows of a request; return the open request, whose replies ``_collect`` reads."""
        asked = _Asked(env_ids=env_ids, arrays=arrays, until=time.monotonic() + self._limit_s)
        for number in self._numbers(env_ids):
            places = self._places(env_ids, number)
            child = self._children[number]
            if child is None:
                asked.lost.update(dict.fromkeys(places.tolist(), self._why[number]))
                continue
            rows = [array[places] if len(array) else array for array in arrays]
            child.send(header, env_ids[places] - np.int32(self._first[number]), *rows)
            asked.rows.append((number, places))
            asked.sockets.append(child.socket)
        return asked

    def _collect(self, asked: _Asked) -> list[tuple[NDArray[np.int64], Message, list[NDArray[Any]]]]:
        """Return ``(rows of the request, header, arrays)`` of each reply; add rows of lost processes to
        ``asked.lost``."""
        answers = []
        for number, places in asked.rows:
            answer = self._answer(number, places, asked.until, asked.lost)
            if answer is not None:
                answers.append((places, *answer))
        return answers

    def _ask_one(
        self, header: Message, env_ids: NDArray[np.int32], i: int, arrays: Sequence[NDArray[Any]], lost: dict[int, str]
    ) -> tuple[Message, list[NDArray[Any]]] | None:
        """Send row ``i`` of a request and return the reply. If the row is lost, store the reason and return None."""
        failed: dict[int, str] = {}
        answers = self._ask(header, env_ids[i : i + 1], arrays, failed)
        failed.update((int(row), reason) for _, found, _ in answers for row, reason in found.get("lost", {}).items())
        if failed:
            lost[i] = failed[0]
            return None
        return answers[0][1], answers[0][2]

    def _answer(
        self, number: int, places: NDArray[np.int64], until: float, lost: dict[int, str]
    ) -> tuple[Message, list[NDArray[Any]]] | None:
        """Return the reply of a process. If it died or hung, kill it, add its rows to ``lost`` and return None."""
        child = self._children[number]
        assert child is not None
        try:
            header, arrays = child.receive(until)
        except (OSError, TimeoutError) as error:
            hung = isinstance(error, TimeoutError)
            self._why[number] = (
                f"the simulator's process hung for {self._limit_s:g} s and was killed" if hung else str(error)
            )
            child.end(0.0)
            self._children[number] = None
            self._memory.clear(slice(self._first[number], self._first[number] + self._sizes[number]))
            lost.update(dict.fromkeys(places.tolist(), self._why[number]))
            return None
        if header.get("error"):
            raise ProtocolError(f"the simulator of '{self._request.env_id}': {header['error']}")
        return header, arrays

    def _numbers(self, env_ids: NDArray[np.int32]) -> list[int]:
        """Return the numbers of the processes that hold the environments ``env_ids``."""
        if len(self._children) == 1:
            return [0]
        numbers: list[int] = np.unique(np.searchsorted(self._first, env_ids, side="right") - 1).tolist()
        return numbers

    def _places(self, env_ids: NDArray[np.int32], number: int) -> NDArray[np.int64]:
        """Return the rows of a request that belong to a process."""
        if len(self._children) == 1:
            return np.arange(len(env_ids))
        first = self._first[number]
        return np.flatnonzero((env_ids >= first) & (env_ids < first + self._sizes[number]))

    def _look(self, env_ids: NDArray[np.int32], rows: NDArray[np.bool_] | None = None, *, final: bool = False) -> Named:
        """Read observations of ``env_ids`` in the shared memory; environments of ended processes have zeros."""
        shared = self._memory.shared.final if final else self._memory.shared.current
        if rows is None and env_ids.tobytes() == self._everyone:
            return dict(shared)
        chosen = env_ids if rows is None else env_ids[rows]
        return {name: array[chosen] for name, array in shared.items()}


class _SharedMemory:
    """Memory of the observations of all environments of a session.

    Raises:
        ConfigError: the observations take more bytes than a file may have.
    """

    def __init__(self, spaces: Message, num_envs: int) -> None:
        size, places = SharedObservations.layout(spaces, num_envs)
        self.spaces, self.num_envs = spaces, num_envs
        self.descriptor = os.memfd_create("penstock-observations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self.shared = SharedObservations(self.descriptor, spaces, num_envs)
        except (OSError, ValueError) as error:
            os.close(self.descriptor)
            raise ConfigError(f"no memory of {size} bytes for observations: {error}") from None
        self.description = ObservationMemory(
            descriptor=self.descriptor, inode=os.fstat(self.descriptor).st_ino, size=size,
            offsets={name: current for name, (current, _) in places.items()},
        )  # fmt: skip

    def clear(self, rows: slice) -> None:
        """Write zeros into ``rows`` of all observations."""
        for which in (self.shared.current, self.shared.final):
            for array in which.values():
                array[rows] = 0

    def close(self) -> None:
        """Close the memory; arrays and mappings of it stay valid. Safe to repeat."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self.shared


@dataclass(slots=True, eq=False, kw_only=True)
class _Asked:
    """A request that was sent to the processes and whose replies are not all read.

    Attributes:
        rows: number of each process that was asked, and its rows of the request.
        lost: reasons why rows get no reply.
    """

    env_ids: NDArray[np.int32]
    arrays: Sequence[NDArray[Any]]
    until: float
    rows: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


class _Child:
    """One process that runs ``child.py``."""

    def __init__(self, python: str, backend: Path, request: OpenEnv, num_envs: int) -> None:
        """Start the process. Raises ConfigError if the interpreter does not start."""
        ours, theirs = socket.socketpair()
        options = {
            "env_id": request.env_id, "num_envs": num_envs, "options": request.options, "camera": request.camera,
            "picture": None if request.picture is None else msgspec.to_builtins(request.picture),
        }  # fmt: skip
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        python,
                        "-P",
                        str(CHILD),
                        str(theirs.fileno()),
                        str(os.getpid()),
                        str(backend),
                        json.dumps(options),
                    ],
                    stdin=subprocess.DEVNULL,  # a library that prompts the user reads an end of file
                    stdout=2,  # standard output goes to the log
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # its own process group, so that ``end`` also kills its descendants
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"interpreter '{python}' does not start: {error.strerror or error}") from None
        self._channel = Channel(ours)

    @property
    def socket(self) -> socket.socket:
        """Socket to the process: the end that the env service holds."""
        return self._channel.socket

    def opened(self, limit_s: float) -> Message:
        """Wait until the environments are created; return their spec.

        Raises:
            ConfigError: the environments cannot be created within ``limit_s``, with the reason.
        """
        try:
            header, _ = self.receive(time.monotonic() + limit_s)
            if header["error"]:
                raise ConfigError(f"environment cannot be made: {header['error']}")
        except ConfigError:
            self.end(0.0)
            raise
        except TimeoutError:
            self.end(0.0)
            raise ConfigError(f"the environments were not made after {limit_s:g} s") from None
        except OSError as error:
            self.end(0.0)
            raise ConfigError(f"the environments cannot be made: {error}; its log says why") from None
        spec: Message = header["spec"]
        return spec

    def share(self, memory: _SharedMemory, first: int, spec: Message) -> None:
        """Have the process write observations into ``memory``, from row ``first``. ``spec``: spec of its environments.

        Raises:
            ConfigError: the process cannot use the memory, or ``spec`` has other names, shapes or dtypes.
        """
        try:
            if spec["observations"] != memory.spaces:
                raise ConfigError(f"two processes of one session observe {spec['observations']} and {memory.spaces}")
            self._channel.socket.settimeout(OPEN_LIMIT_S)
            socket.send_fds(self._channel.socket, [b"f"], [memory.descriptor])
            self._channel.send({"spaces": memory.spaces, "first": first, "total": memory.num_envs})
            header, _ = self.receive(time.monotonic() + OPEN_LIMIT_S)
            if header["error"]:
                raise ConfigError(header["error"])
        except ConfigError:
            self.end(0.0)
            raise
        except OSError as error:  # TimeoutError is one
            self.end(0.0)
            raise ConfigError(f"the environments cannot be made: {error}; its log says why") from None

    def send(self, header: Message, *arrays: NDArray[Any]) -> None:
        """Send a request. Errors are ignored, because reading the reply reports a dead process."""
        self._channel.socket.settimeout(OPEN_LIMIT_S)
        try:
            self._channel.send(header, *arrays)
        except OSError:
            return

    def receive(self, until: float) -> tuple[Message, list[NDArray[Any]]]:
        """Read one message.

        Raises:
            TimeoutError: no message by the deadline ``until`` (monotonic seconds).
            ConnectionError: the process ended.
        """
        self._channel.socket.settimeout(max(0.001, until - time.monotonic()))
        try:
            message = self._channel.receive()
        except ConnectionError:  # it was killed before it read the request
            message = None
        if message is None:
            raise ConnectionError(f"the simulator's process died{self._status()}")
        return message

    def hang_up(self) -> None:
        """Ask the process to exit, by closing the socket."""
        self._channel.socket.close()

    def end(self, patience_s: float) -> None:
        """Wait up to ``patience_s`` for the process to exit, then kill it and its descendants."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(CLOSE_LIMIT_S)

    def _status(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" of signal {signal.Signals(-code).name}" if code < 0 else f" with exit status {code}"


def _spec_of(request: OpenEnv, spec: Message) -> EnvSpec:
    shape, dtype = spec["action"]
    return EnvSpec(
        env_id=request.env_id,
        backend=request.backend,
        num_envs=request.num_envs,
        observations={name: ArraySpec(tuple(one[0]), one[1]) for name, one in spec["observations"].items()},
        action_shape=tuple(shape),
        action_dtype=dtype,
        num_actions=spec["num_actions"],
        action_low=spec["low"],
        action_high=spec["high"],
        max_episode_steps=spec["max_episode_steps"],
        has_success=spec["has_success"],
        has_snapshots=bool(spec.get("snapshots")),
        versions=spec["versions"] | {"python": f"{sys.version_info.major}.{sys.version_info.minor}"},
    )


def _at(places: NDArray[np.int64], reasons: dict[str, str]) -> dict[int, str]:
    """Return ``reasons`` with the row numbers of the whole request as keys. The given keys are row numbers (as text) in
    the part of the request that one process handles. Row i of this part is row ``places[i]`` of the whole request."""
    return {int(places[int(place)]): reason for place, reason in reasons.items()}
