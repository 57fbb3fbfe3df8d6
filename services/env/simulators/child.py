"""Hosts the environments of one session in a process of its own. ``process.py`` starts it and talks to it.

The interpreter that runs this file has the simulator; it need not have Penstock. So this file and the adapters in
``backends`` import the standard library, NumPy and the simulator alone.

Messages over the socket: ``u32 length | JSON header | arrays``, little endian; the header lists dtype and shape of each
array. Observations do not travel over the socket: the child writes them into memory that it shares with the service,
``[B, ...]`` for the current observations and ``[B, ...]`` for the last ones of ended episodes, by name.

An environment that raises loses its episode and nothing else: the child makes it anew at its next reset.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Channel", "Environment", "Outcome", "SharedObservations"]

LENGTH = struct.Struct("<I")
ALIGN = 64
PR_SET_PDEATHSIG = 1
MAX_REASON = 2000
"""Characters of an error that reach the client; the log has all of it."""

Message = dict[str, Any]
Outcome = tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]
"""Observations, reward, terminated, truncated, success of one step."""


class Environment(Protocol):
    """One environment. Adapters in ``backends`` implement it; their ``make(env_id, options)`` returns one."""

    spec: Message
    """``observations``: name -> (shape, dtype); ``action``: (shape, dtype); ``num_actions`` or None; ``low``, ``high``;
    ``max_episode_steps`` or None; ``has_success``; ``versions``."""
    task: str
    """The task in words, or ''."""

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Start the episode that ``state_id`` names; everything random in it follows from that number."""

    def step(self, action: Any) -> Outcome:
        """Execute one action."""

    def state(self) -> bytes:
        """The simulator's state: equal states continue equally under equal actions."""

    def close(self) -> None:
        """Free what the environment holds."""


class Channel:
    """One end of the socket. Blocking; not shared between threads."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, header: Message, *arrays: NDArray[Any]) -> None:
        """Send one message."""
        plain = [np.ascontiguousarray(array) for array in arrays]
        head = json.dumps({**header, "arrays": [[a.dtype.str, a.shape] for a in plain]}).encode()
        self.socket.sendall(b"".join([LENGTH.pack(len(head)), head, *(array.tobytes() for array in plain)]))

    def receive(self) -> tuple[Message, list[NDArray[Any]]] | None:
        """The next message; None once the other end is closed."""
        size = self._exactly(LENGTH.size)
        if size is None:
            return None
        head = self._exactly(LENGTH.unpack(size)[0])
        if head is None:
            return None
        header: Message = json.loads(head)
        arrays = []
        for name, shape in header.pop("arrays"):
            dtype = np.dtype(name)
            data = self._exactly(dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
            if data is None:
                return None
            arrays.append(np.frombuffer(data, dtype).reshape(shape))
        return header, arrays

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            chunk = self.socket.recv(size - len(parts))
            if not chunk:
                return None
            parts += chunk
        return bytes(parts)


class SharedObservations:
    """Current and final observations of B environments in memory that child and service map."""

    def __init__(self, descriptor: int, spaces: Mapping[str, Sequence[Any]], num_envs: int) -> None:
        size, places = self.layout(spaces, num_envs)
        self._memory = mmap.mmap(descriptor, size)
        self.current: dict[str, NDArray[Any]] = {}
        """By name: [B, ...]."""
        self.final: dict[str, NDArray[Any]] = {}
        """By name: [B, ...], the last observation of an episode that ended in the last request."""
        for name, (shape, dtype) in spaces.items():
            for which, start in zip((self.current, self.final), places[name], strict=True):
                count = num_envs * int(np.prod(shape, dtype=np.int64))
                flat = np.frombuffer(self._memory, np.dtype(dtype), count, start)
                which[name] = flat.reshape((num_envs, *shape))

    @staticmethod
    def layout(spaces: Mapping[str, Sequence[Any]], num_envs: int) -> tuple[int, dict[str, tuple[int, int]]]:
        """Bytes in all, and where the current and the final observations of each name begin."""
        size, places = 0, {}
        for name, (shape, dtype) in spaces.items():
            nbytes = num_envs * int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            step = nbytes + -nbytes % ALIGN
            places[name] = (size, size + step)
            size += 2 * step
        return max(size, ALIGN), places


class Host:
    """The environments of this process, and what each request does to them."""

    def __init__(self, make: Callable[[], Environment], num_envs: int) -> None:
        self._make = make
        self._environments: list[Environment | None] = [make() for _ in range(num_envs)]
        first = self._environments[0]
        assert first is not None
        self.spec = first.spec
        self.descriptor = os.memfd_create("penstock-observations")
        os.ftruncate(self.descriptor, SharedObservations.layout(self.spec["observations"], num_envs)[0])
        self._shared = SharedObservations(self.descriptor, self.spec["observations"], num_envs)

    def handle(self, header: Message, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Answer one request: reset or step."""
        handlers = {"reset": self._reset, "step": self._step}
        return handlers[header["kind"]](arrays)

    def close(self) -> None:
        """Close every environment."""
        for environment in self._environments:
            if environment is not None:
                with contextlib.suppress(Exception):
                    environment.close()

    def _reset(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        env_ids, state_ids = arrays
        lost: dict[int, str] = {}
        hashes, tasks = np.zeros(len(env_ids), np.uint64), []
        for i, (env, state) in enumerate(zip(env_ids.tolist(), state_ids.tolist(), strict=True)):
            hashes[i], task = self._start(i, env, state, lost)
            tasks.append(task)
        return {"lost": lost, "tasks": tasks}, [hashes]

    def _start(self, i: int, env: int, state: int, lost: dict[int, str]) -> tuple[int, str]:
        """Begin an episode; returns the hash of its first state and its task."""
        with self._losing(i, env, lost):
            environment = self._environments[env]
            if environment is None:
                environment = self._environments[env] = self._make()
            self._write(self._shared.current, env, environment.reset(state))
            return state_hash(environment), environment.task
        return 0, ""

    def _step(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Execute a chunk in each environment, up to the end of its episode; then begin the next one where asked."""
        env_ids, actions, next_state_ids = arrays
        n, C = actions.shape[:2]
        rewards, valid = np.zeros((n, C), np.float32), np.zeros(n, np.int32)
        terminated, truncated, success = (np.zeros((n, C), np.bool_) for _ in range(3))
        hashes, tasks = np.zeros(n, np.uint64), [""] * n
        lost, not_started = dict[int, str](), dict[int, str]()
        for i, env in enumerate(env_ids.tolist()):
            environment = self._environments[env]
            with self._losing(i, env, lost):
                assert environment is not None, "it was lost and not reset"
                for c in range(C):
                    observations, rewards[i, c], *flags = environment.step(actions[i, c])
                    terminated[i, c], truncated[i, c], success[i, c] = flags
                    valid[i] += 1
                    if terminated[i, c] or truncated[i, c]:
                        break
                self._write(self._shared.current, env, observations)
            if i in lost:
                for column in (rewards, valid, terminated, truncated, success):
                    column[i] = 0
            elif (terminated[i] | truncated[i]).any():
                for name, final in self._shared.final.items():
                    final[env] = self._shared.current[name][env]
                if len(next_state_ids):
                    hashes[i], tasks[i] = self._start(i, env, int(next_state_ids[i]), not_started)
        found = {"lost": lost, "not_started": not_started, "tasks": tasks}
        return found, [rewards, terminated, truncated, success, valid, hashes]

    def _write(self, where: dict[str, NDArray[Any]], env: int, observations: Mapping[str, NDArray[Any]]) -> None:
        """Copy observations into the shared memory. Raises ValueError where one is not finite."""
        for name, array in where.items():
            value = observations[name]
            if array.dtype.kind == "f" and not np.isfinite(value).all():
                raise ValueError(f"observation '{name}' is not finite")
            array[env] = value

    @contextlib.contextmanager
    def _losing(self, i: int, env: int, lost: dict[int, str]) -> Iterator[None]:
        """An environment that raises is closed and noted in ``lost``; the others go on."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a simulator may raise anything
            traceback.print_exc()
            lost[i] = reason_of(error)
            environment, self._environments[env] = self._environments[env], None
            if environment is not None:
                with contextlib.suppress(Exception):
                    environment.close()


def state_hash(environment: Environment) -> int:
    """64 bits of a hash of the simulator's state."""
    return int.from_bytes(hashlib.blake2b(environment.state(), digest_size=8).digest(), "little")


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


def load_backend(path: str) -> Callable[[str, Message], Environment]:
    """The function ``make`` of an adapter, from its file.

    Raises:
        ValueError: the file cannot be loaded, or has no such function.
    """
    found = importlib.util.spec_from_file_location(f"penstock_backend_{Path(path).stem}", path)
    if found is None or found.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    make: Callable[[str, Message], Environment] | None = getattr(module, "make", None)
    if make is None:
        raise ValueError(f"{path} has no function make(env_id, options)")
    return make


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even where a simulator hangs."""
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
        make = load_backend(backend)
        host = Host(lambda: make(options["env_id"], options["options"]), options["num_envs"])
    except (Exception, SystemExit) as error:  # a simulator may raise anything while it is imported
        traceback.print_exc()
        channel.send({"error": reason_of(error)})
        return
    channel.send({"error": "", "spec": host.spec})
    socket.send_fds(channel.socket, [b"f"], [host.descriptor])
    while (message := channel.receive()) is not None:
        try:
            header, arrays = host.handle(*message)
        except (Exception, SystemExit) as error:  # the service is told, and decides
            traceback.print_exc()
            header, arrays = {"error": reason_of(error)}, []
        channel.send(header, *arrays)
    host.close()


if __name__ == "__main__":
    main(sys.argv[1:])
