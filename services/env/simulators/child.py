"""Hosts environments of one session in a child process, which ``process.py`` starts and controls.

The interpreter that runs this file has the simulator, but not necessarily Penstock. So this file and the adapters in
``backends`` import only the standard library, NumPy and the simulator.

Messages over the socket: ``u32 header bytes | u32 array bytes | JSON header | arrays``, little endian, each padded to
eight bytes; the header lists dtype and shape of each array. Observations are not sent over the socket: the child
writes them into memory of the session, whose descriptor the service sends once it knows their shapes. This
memory holds, by name, ``[B, ...]`` of current observations and ``[B, ...]`` of last observations of ended episodes; B
counts the environments of all processes of the session, and each process writes its own rows.

An environment that raises an error loses only its own episode: the child creates it again at its next reset. If the
adapter offers ``make_batch``, one object simulates all environments of the process (``batch.py``).

With ``camera``, imageio-ffmpeg films every episode (``camera.py``). With ``picture``, the environments also observe
the camera image, as ``image``, and films show this observation. Adapters whose simulator has a camera offer
``make_with_camera`` in addition to ``make``. The environment that it returns also has ``render()`` and
``frames_per_s``, and may have ``draw_at(height, width)``, which sets the size of later images.

A snapshot is a message of this format, stored as bytes: the description of the environment, its current
observations and the values of its ``snapshot()``. Reading one executes no code, unlike a pickle.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import math
import mmap
import os
import signal
import socket
import struct
import sys
import termios
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # an interpreter of simulators does not have the package
    from penstock.services.env.simulators.batch import Batch
    from penstock.services.env.simulators.interfaces import Environment, Values

__all__ = [
    "Channel",
    "SharedObservations",
    "holds_message",
]

BATCH = Path(__file__).with_name("batch.py")
CAMERA = Path(__file__).with_name("camera.py")
LENGTHS = struct.Struct("<II")
WORD = 8
ALIGN = 64
PR_SET_PDEATHSIG = 1
MAX_REASON = 2000
"""Maximum characters of an error message to the client; the log has the whole message."""

CAMERA_NICENESS = 10
"""Niceness of processes that film, so that processes of training run first."""


Message = dict[str, Any]


class Channel:
    """One end of the socket between the env service and a child process; both sides use this class. Blocking and not
    thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, header: Message, *arrays: NDArray[Any]) -> None:
        """Send one message."""
        self.socket.sendall(_encoded(header, arrays))

    def receive(self) -> tuple[Message, list[NDArray[Any]]] | None:
        """Read the next message; return None once the other end is closed."""
        sizes = self._exactly(LENGTHS.size)
        if sizes is None:
            return None
        start, length = LENGTHS.unpack(sizes)
        data = self._exactly(start + length)
        return None if data is None else _decoded(data, start)

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            count = self.socket.recv_into(view[filled:])
            if not count:
                return None
            filled += count
        return data


def holds_message(connection: socket.socket) -> bool:
    """Return True if a whole message can be read without waiting. Return False if not, or if the connection is lost."""
    try:
        sizes = connection.recv(LENGTHS.size, socket.MSG_PEEK)
        (waiting,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
    except OSError:  # a process that was killed before it read the request resets the connection
        return False
    return len(sizes) == LENGTHS.size and waiting >= LENGTHS.size + sum(LENGTHS.unpack(sizes))


def _encoded(header: Message, arrays: Sequence[NDArray[Any]]) -> bytes:
    plain = [np.asarray(array, order="C") for array in arrays]
    head = _padded(json.dumps({**header, "arrays": [[a.dtype.str, a.shape] for a in plain]}).encode())
    body = b"".join(_padded(array.tobytes()) for array in plain)
    return LENGTHS.pack(len(head), len(body)) + head + body


def _decoded(data: bytearray, start: int) -> tuple[Message, list[NDArray[Any]]]:
    """Decode a message whose header takes ``start`` bytes. The arrays alias ``data``."""
    header: Message = json.loads(data[:start])
    arrays = []
    for name, shape in header.pop("arrays"):
        dtype = np.dtype(name)
        count = math.prod(shape)
        if count < 0:
            raise ValueError("an array has a negative size")
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape) if count else np.zeros(shape, dtype))
        start += dtype.itemsize * count
        start += -start % WORD
    return header, arrays


def _padded(data: bytes) -> bytes:
    """Pad ``data`` with spaces to a multiple of eight bytes. JSON allows spaces at its end, and arrays become
    aligned."""
    return data + b" " * (-len(data) % WORD)


def pack_values(values: Values) -> bytes:
    """Encode the values of a snapshot. Raises TypeError for a value of a type that ``Values`` does not allow."""
    arrays: list[NDArray[Any]] = []
    return _encoded({"values": _plain(values, arrays)}, arrays)


def unpack_values(data: bytes) -> Values:
    """Decode the result of ``pack_values``. Raises ValueError if ``data`` is not such a result."""
    try:
        start, length = LENGTHS.unpack_from(data)
        if LENGTHS.size + start + length != len(data):
            raise ValueError("its length is wrong")
        header, arrays = _decoded(bytearray(data[LENGTHS.size :]), start)
        values: Values = _rebuilt(header["values"], [*arrays])
    except (struct.error, KeyError, IndexError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"not a snapshot: {error}") from None
    return values


def _plain(node: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return ``node`` as JSON. Append its arrays to ``arrays``; the JSON has their indices instead."""
    if isinstance(node, np.ndarray | np.generic):
        if node.dtype.hasobject or node.dtype.names is not None:
            raise TypeError(f"an array of {node.dtype} has no place in a snapshot")
        arrays.append(np.asarray(node))
        return {"array" if isinstance(node, np.ndarray) else "scalar": len(arrays) - 1}
    if isinstance(node, dict):
        if wrong := [name for name in node if not isinstance(name, str)]:
            raise TypeError(f"the key {wrong[0]!r} is no text and has no place in a snapshot")
        return {"dict": {name: _plain(node[name], arrays) for name in sorted(node)}}
    if isinstance(node, tuple):
        return {"tuple": [_plain(value, arrays) for value in node]}
    if isinstance(node, list):
        return [_plain(value, arrays) for value in node]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"a {type(node).__name__} has no place in a snapshot")


def _rebuilt(node: Any, arrays: list[NDArray[Any] | None]) -> Any:
    """Return the value that ``_plain`` encoded; each array has its own memory. Raises ValueError if an index occurs
    twice."""
    if isinstance(node, list):
        return [_rebuilt(value, arrays) for value in node]
    if not isinstance(node, dict):
        return node
    [(kind, inner)] = node.items()
    if kind == "dict":
        return {name: _rebuilt(value, arrays) for name, value in inner.items()}
    if kind == "tuple":
        return tuple(_rebuilt(value, arrays) for value in inner)
    found, arrays[inner] = arrays[inner], None
    if found is None:  # a small message would otherwise take any amount of memory
        raise ValueError("an array stands there twice")
    return found.copy() if kind == "array" else found[()]


class SharedObservations:
    """Current and final observations of B environments, in memory that the processes of a session share.

    Args:
        descriptor: the memory, at least ``layout(...)[0]`` bytes.
        spaces: shape and dtype of one observation, by name.
        rows: environments whose rows ``current`` and ``final`` show; by default all.
    """

    def __init__(
        self, descriptor: int, spaces: Mapping[str, Sequence[Any]], num_envs: int, rows: slice = slice(None)
    ) -> None:
        size, places = self.layout(spaces, num_envs)
        self._memory = mmap.mmap(descriptor, size)
        self.current: dict[str, NDArray[Any]] = {}
        """Newest observations [B, ...] by name."""
        self.final: dict[str, NDArray[Any]] = {}
        """Last observations [B, ...] by name, of episodes that ended in the last request; other rows are undefined."""
        for name, (shape, dtype) in spaces.items():
            for which, start in zip((self.current, self.final), places[name], strict=True):
                count = num_envs * int(np.prod(shape, dtype=np.int64))
                flat = np.frombuffer(self._memory, np.dtype(dtype), count, start)
                which[name] = flat.reshape((num_envs, *shape))[rows]

    @staticmethod
    def layout(spaces: Mapping[str, Sequence[Any]], num_envs: int) -> tuple[int, dict[str, tuple[int, int]]]:
        """Return the size in bytes, and the byte offsets of current and final observations by name."""
        size, places = 0, {}
        for name, (shape, dtype) in spaces.items():
            nbytes = num_envs * int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            step = nbytes + -nbytes % ALIGN
            places[name] = (size, size + step)
            size += 2 * step
        return max(size, ALIGN), places


class Host:
    """Holds the environments of this process and executes requests on them.

    Args:
        make: creates an environment, given its number.
        about: the request for the environments; snapshots made for another request are refused.
        batch: the object whose rows ``make`` returns, if one object simulates all environments.
    """

    def __init__(self, make: Callable[[int], Any], num_envs: int, about: Message, batch: Batch | None = None) -> None:
        self._make, self._about, self._batch = make, about, batch
        self._environments: list[Environment | None] = [make(env) for env in range(num_envs)]
        first = self._environments[0]
        assert first is not None
        self.spec = first.spec
        self._shared: SharedObservations

    def share(self, descriptor: int, *, spaces: Mapping[str, Sequence[Any]], first: int, total: int) -> None:
        """Write observations into the memory with file descriptor ``descriptor`` from now on. The memory has one row
        for each of the session's ``total`` environments; this process uses the rows from ``first`` on."""
        rows = slice(first, first + len(self._environments))
        self._shared = SharedObservations(descriptor, spaces, total, rows)

    def handle(self, header: Message, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Execute one request and return the reply."""
        handlers = {
            "reset": self._reset, "step": self._step, "film": self._film, "snapshot": self._snapshot,
            "restore": self._restore, "describe": self._describe,
        }  # fmt: skip
        return handlers[header["kind"]](arrays)

    def close(self) -> None:
        """Close every environment."""
        if self._batch is not None:
            self._batch.close()
        for environment in self._environments:
            if environment is not None:
                with contextlib.suppress(Exception):
                    environment.close()

    def _describe(self, _: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Return the current spec of the environments. An episode may have changed it: ``has_success`` becomes True
        once a step has reported whether it succeeded."""
        first = self._environments[0]
        return {"spec": self.spec if first is None else first.spec}, []

    def _reset(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        env_ids, state_ids = arrays
        lost: dict[int, str] = {}
        hashes, tasks = self._begin(list(range(len(env_ids))), env_ids, state_ids, lost)
        return {"lost": lost, "tasks": tasks}, [hashes]

    def _begin(
        self, places: list[int], env_ids: NDArray[Any], state_ids: NDArray[Any], lost: dict[int, str]
    ) -> tuple[NDArray[np.uint64], list[str]]:
        """Begin the episodes that rows ``places`` of a request ask for. Return the hashes of the first states [n] and
        the tasks, for all n rows of the request; rows without a new episode have 0 and ''. Store reasons of failures in
        ``lost``."""
        hashes, tasks = np.zeros(len(env_ids), np.uint64), [""] * len(env_ids)
        if self._batch is None:
            for i in places:
                hashes[i], tasks[i] = self._start(i, int(env_ids[i]), int(state_ids[i]), lost)
        elif places:
            try:
                observations, states = self._batch.begin(env_ids[places], state_ids[places])
            except (Exception, SystemExit) as error:  # a simulator may raise anything
                lost.update(dict.fromkeys(places, reason_of(error)))
                return hashes, tasks
            for at, i in enumerate(places):
                env = int(env_ids[i])
                self._environments[env] = self._make(env)
                try:
                    self._write(self._shared.current, env, {name: rows[at] for name, rows in observations.items()})
                    hashes[i], tasks[i] = hash_of(states[at]), self._batch.task
                except (KeyError, ValueError) as error:
                    self._lose(i, env, error, lost)
        return hashes, tasks

    def _start(self, i: int, env: int, state: int, lost: dict[int, str]) -> tuple[int, str]:
        """Begin an episode; return the hash of its first state, and its task. Store the reason of a failure in
        ``lost``."""
        try:
            environment = self._environments[env]
            if environment is None:
                environment = self._environments[env] = self._make(env)
            self._write(self._shared.current, env, environment.reset(state))
            return hash_of(environment.state()), environment.task
        except (Exception, SystemExit) as error:  # a simulator may raise anything
            self._lose(i, env, error, lost)
        return 0, ""

    def _step(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Execute a chunk of actions in each environment. Where an episode ends, begin the next one if the request
        gives a state id for it."""
        env_ids, actions, next_state_ids = arrays
        n, C = actions.shape[:2]
        rewards, valid = np.zeros((n, C), np.float32), np.full(n, C, np.int32)
        terminated, truncated, success = flags = tuple(np.zeros((n, C), np.bool_) for _ in range(3))
        hashes, tasks = np.zeros(n, np.uint64), list[str]()
        not_started: dict[int, str] = {}
        if self._batch is None:
            executed, lost = self._play_each(env_ids, actions, rewards, flags)
        else:
            executed, lost = self._batch.play(env_ids, actions, self._shared.current, rewards, flags)
        self._lose_not_finite(env_ids, lost)
        for column in (rewards, executed, terminated, truncated, success):
            column[list(lost)] = 0
        ended = np.flatnonzero(executed).tolist()
        valid[ended], valid[list(lost)] = executed[ended], 0
        for name, final in self._shared.final.items():
            for env in env_ids[ended].tolist():
                final[env] = self._shared.current[name][env]
        if len(next_state_ids):
            hashes, tasks = self._begin(ended, env_ids, next_state_ids, not_started)
        found = {"lost": lost, "not_started": not_started, "tasks": tasks if any(tasks) else []}
        return found, [rewards, terminated, truncated, success, valid, hashes]

    def _play_each(
        self, env_ids: NDArray[Any], actions: NDArray[Any], rewards: NDArray[np.float32],
        flags: Sequence[NDArray[np.bool_]],
    ) -> tuple[NDArray[np.int32], dict[int, str]]:  # fmt: skip
        """Execute chunks [n, C, ...] in one environment after another; see ``Batch.play``."""
        executed, lost = np.zeros(len(env_ids), np.int32), dict[int, str]()
        for i, (env, row) in enumerate(zip(env_ids.tolist(), actions, strict=True)):
            try:
                executed[i] = self._play(i, env, row, rewards, flags)
            except (Exception, SystemExit) as error:  # a simulator may raise anything
                self._lose(i, env, error, lost)
        return executed, lost

    def _play(
        self, i: int, env: int, actions: NDArray[Any], rewards: NDArray[np.float32], flags: Sequence[NDArray[np.bool_]]
    ) -> int:
        """Execute a chunk [C, ...] in one environment, with the results in row ``i``.

        Returns the number of executed actions if the episode has ended, else 0.
        """
        environment, executed = self._environments[env], 0
        assert environment is not None, "it was lost and not reset"
        for c, action in enumerate(actions):
            observations, rewards[i, c], over, cut, solved = environment.step(action)
            if over or cut or solved:
                for flag, value in zip(flags, (over, cut, solved), strict=True):
                    flag[i, c] = value
            if over or cut:
                executed = c + 1
                break
        for name, array in self._shared.current.items():
            array[env] = observations[name]
        return executed

    def _film(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Return the film of the newest episode of one environment."""
        film = getattr(self._environments[int(arrays[0][0])], "film", None)
        if film is None:
            return {"reason": "there is no camera, or the episode was lost"}, [np.zeros(0, np.uint8)]
        data, reason = film()
        return {"reason": reason[:MAX_REASON]}, [np.frombuffer(data, np.uint8)]

    def _snapshot(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Return the snapshot of one environment."""
        env = int(arrays[0][0])
        if self._batch is not None and (why := self._batch.why_lost(env)):
            return {"lost": {0: why}}, []
        environment: Any = self._environments[env]
        seen = {name: array[env] for name, array in self._shared.current.items()}
        data = pack_values({"about": self._described(), "seen": seen, "values": environment.snapshot()})
        return {}, [np.frombuffer(data, np.uint8)]

    def _restore(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Continue one environment from a snapshot. Raises ValueError if the snapshot was made with another task, other
        options or other versions of the simulator's packages."""
        env = int(arrays[0][0])
        stored = unpack_values(arrays[1].tobytes())
        if stored.get("about") != self._described():
            raise ValueError("the snapshot was made with another task, other options or other versions")
        lost: dict[int, str] = {}
        hashes, task = np.zeros(1, np.uint64), ""
        try:
            environment: Any = self._environments[env]
            if environment is None:
                environment = self._environments[env] = self._make(env)
            environment.restore(stored["values"])
            self._write(self._shared.current, env, stored["seen"])
            hashes[0], task = hash_of(environment.state()), environment.task
        except (Exception, SystemExit) as error:  # a simulator may raise anything
            self._lose(0, env, error, lost)
        return {"lost": lost, "tasks": [task]}, [hashes]

    def _described(self) -> str:
        return json.dumps({"request": self._about, "versions": self.spec["versions"]}, sort_keys=True)

    def _write(self, where: dict[str, NDArray[Any]], env: int, observations: Mapping[str, NDArray[Any]]) -> None:
        """Copy observations into the shared memory. Raises ValueError if one is not finite."""
        for name, array in where.items():
            array[env] = observations[name]
            if array.dtype.kind == "f" and not np.isfinite(array[env]).all():
                array[env] = 0
                raise ValueError(f"observation '{name}' is not finite")

    def _lose_not_finite(self, env_ids: NDArray[Any], lost: dict[int, str]) -> None:
        """Record as lost the episodes whose newest observations are not finite."""
        for name, array in self._shared.current.items():
            if array.dtype.kind != "f":
                continue
            # The sum of squares is a fast first test; it is not finite if a number is not finite or is very large.
            rows = array if len(env_ids) == len(array) else array[env_ids]
            if math.isfinite(np.vdot(rows, rows)):
                continue
            finite = np.isfinite(array[env_ids].reshape(len(env_ids), -1)).all(axis=1)
            for i in np.flatnonzero(~finite).tolist():
                env = int(env_ids[i])
                array[env] = 0
                if i not in lost:
                    self._lose(i, env, ValueError(f"observation '{name}' is not finite"), lost)

    def _lose(self, i: int, env: int, error: BaseException, lost: dict[int, str]) -> None:
        """Close environment ``env``, which raised ``error``, and record the reason at ``lost[i]``."""
        traceback.print_exception(error)
        lost[i] = reason_of(error)
        environment, self._environments[env] = self._environments[env], None
        if environment is not None:
            with contextlib.suppress(Exception):
                environment.close()


def hash_of(state: bytes) -> int:
    """Return a 64-bit hash of a simulator's state."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")


def reason_of(error: BaseException) -> str:
    """Return the type and message of an error, at most MAX_REASON characters."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


def load_file(path: Path) -> ModuleType:
    """Import the Python file ``path``. Raises ValueError if it is no Python file."""
    found = importlib.util.spec_from_file_location(f"penstock_backend_{path.stem}", path)
    if found is None or found.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def load_backend(
    path: str, *, camera: bool = False, picture: Message | None = None
) -> Callable[[str, Message], Environment]:
    """Load an adapter file and return its ``make``. If films or images are wanted, return its ``make_with_camera``
    instead, wrapped so that the environments record the films and observe the images.

    Args:
        camera: film every episode.
        picture: arguments of ``Pictured``; None: the environments do not observe images.

    Raises:
        ValueError: the file is not a Python file, or lacks the function.
    """
    if not camera and picture is None:
        return plain_make(load_file(Path(path)))
    cameras = load_file(CAMERA)
    cameras.choose_renderer()
    make: Callable[[str, Message], Any] | None = getattr(load_file(Path(path)), "make_with_camera", None)
    if make is None:
        raise ValueError("this simulator's adapter has no camera")
    seen = make if picture is None else (lambda env_id, options: cameras.Pictured(make(env_id, options), **picture))
    return (lambda env_id, options: cameras.Filmed(seen(env_id, options))) if camera else seen


def plain_make(adapter: ModuleType) -> Callable[[str, Message], Environment]:
    """Return the ``make`` of an adapter. Raises ValueError if it has none."""
    make: Callable[[str, Message], Environment] | None = getattr(adapter, "make", None)
    if make is None:
        raise ValueError(f"{adapter.__file__} has no function make(env_id, options)")
    return make


def open_host(backend: str, request: Message) -> Host:
    """Create the environments of a request, all in one object if the adapter's ``make_batch`` returns one for the
    options."""
    env_id, options, num_envs = request["env_id"], request["options"], request["num_envs"]
    about = {name: request[name] for name in ("env_id", "options", "picture")}
    if request["camera"] or request["picture"] is not None:
        make = load_backend(backend, camera=request["camera"], picture=request["picture"])
    else:
        adapter = load_file(Path(backend))
        make_batch = getattr(adapter, "make_batch", lambda *_: None)
        first = make_batch(env_id, options, num_envs)
        if first is not None:
            batch: Batch = load_file(BATCH).Batch(lambda: make_batch(env_id, options, num_envs), first, num_envs)
            return Host(batch.row, num_envs, about, batch)
        make = plain_make(adapter)
    return Host(lambda _: make(env_id, options), num_envs, about)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even if the simulator hangs."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Run ``child.py FD PARENT BACKEND OPTIONS`` until the service closes the socket."""
    descriptor, parent, backend, request = arguments
    die_with_parent(int(parent))
    warnings.filterwarnings("ignore")
    channel = Channel(socket.socket(fileno=int(descriptor)))
    options = json.loads(request)
    try:
        if options["camera"]:
            os.nice(CAMERA_NICENESS)
        host = open_host(backend, options)
    except (Exception, SystemExit) as error:  # a simulator may raise anything while it is imported
        traceback.print_exc()
        channel.send({"error": reason_of(error)})
        return
    channel.send({"error": "", "spec": host.spec})
    _, descriptors, _, _ = socket.recv_fds(channel.socket, 1, 1)
    message = channel.receive()
    try:
        if message is not None:
            host.share(descriptors[0], **message[0])
            os.close(descriptors[0])
            channel.send({"error": ""})
    except (OSError, ValueError, IndexError) as error:
        channel.send({"error": f"no memory for observations: {reason_of(error)}"})
    while (message := channel.receive()) is not None:
        try:
            header, arrays = host.handle(*message)
        except (Exception, SystemExit) as error:  # the service gets the error and decides
            traceback.print_exc()
            header, arrays = {"error": reason_of(error)}, []
        channel.send(header, *arrays)
    host.close()


if __name__ == "__main__":
    main(sys.argv[1:])
