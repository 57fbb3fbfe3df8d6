"""Hosts environments of one session in a child process, which ``process.py`` starts and controls.

The interpreter that runs this file has the simulator, but not necessarily Penstock. So this file and the adapters in
``backends`` import only the standard library, NumPy and the simulator.

Messages over the socket: ``u32 header bytes | u32 array bytes | JSON header | arrays``, little endian, each padded to
eight bytes; the header lists dtype and shape of each array. Observations are not sent over the socket: the child
writes them into memory that it shares with the service, by name: ``[B, ...]`` for the current observations and
``[B, ...]`` for the last observations of ended episodes.

An environment that raises an error loses only its own episode: the child creates it again at its next reset.

With ``camera``, imageio-ffmpeg films every episode. With ``picture``, the environments also observe the camera image,
as ``image``, and films show this observation. Adapters whose simulator has a camera offer ``make_with_camera`` in
addition to ``make``. The environment that it returns also has ``render()`` and ``frames_per_s``, and may have
``draw_at(height, width)``, which sets the size of later images.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
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
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Channel", "Environment", "Filmable", "Outcome", "Pictured", "SharedObservations", "shrunk"]

LENGTHS = struct.Struct("<II")
WORD = 8
ALIGN = 64
PR_SET_PDEATHSIG = 1
MAX_REASON = 2000
"""Maximum characters of an error message to the client; the log has all of it."""

FRAMES_PER_S = 20
"""Frame rate of films. They skip steps of long episodes, and of simulators with three times this rate or more."""
CAMERA_NICENESS = 10
"""Niceness of processes that film, so that processes of training run first."""
MOST_FRAMES = 600
LAST_FRAMES = 20
"""Number of frames that repeat the last image at the end of a film."""
MOST_FILM_BYTES = 4 << 20
DRAWN = 128
"""Approximate pixels of the longer side of a render for a smaller ``image``: averaging pixels smooths edges."""
SHOWN = 256
"""Approximate pixels of the longer side of a film that shows the observation ``image``."""
BRIGHTNESS = np.array([299, 587, 114], np.uint32)
"""Weights of red, green and blue in grey, in thousandths (ITU-R BT.601)."""
IMAGE = "image"

Message = dict[str, Any]
Outcome = tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]
"""Observations, reward, terminated, truncated, success of one step."""


class Environment(Protocol):
    """One environment, implemented by the adapters in ``backends``, whose ``make(env_id, options)`` returns it."""

    spec: Message
    """``observations``: name -> (shape, dtype); ``action``: (shape, dtype); ``num_actions`` or None; ``low``, ``high``;
    ``max_episode_steps`` or None; ``has_success``; ``versions``."""
    task: str
    """Description of the task, or ''."""

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Start episode ``state_id``, which determines all randomness in it; return the first observations."""

    def step(self, action: Any) -> Outcome:
        """Execute one action."""

    def state(self) -> bytes:
        """Return the full state of the simulator: from equal states, equal actions lead to equal episodes."""

    def close(self) -> None:
        """Free the resources of the environment."""


class Filmable(Environment, Protocol):
    """An environment with a camera."""

    frames_per_s: float
    """Steps per second of simulated time."""

    def render(self) -> NDArray[np.uint8]:
        """Render the current state as [H, W, 3] with even H and W."""


class Channel:
    """One end of the socket. Blocking and not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, header: Message, *arrays: NDArray[Any]) -> None:
        """Send one message."""
        plain = [np.ascontiguousarray(array) for array in arrays]
        head = _padded(json.dumps({**header, "arrays": [[a.dtype.str, a.shape] for a in plain]}).encode())
        body = b"".join(_padded(array.tobytes()) for array in plain)
        self.socket.sendall(LENGTHS.pack(len(head), len(body)) + head + body)

    def receive(self) -> tuple[Message, list[NDArray[Any]]] | None:
        """Read the next message; return None once the other end is closed."""
        sizes = self._exactly(LENGTHS.size)
        if sizes is None:
            return None
        start, length = LENGTHS.unpack(sizes)
        data = self._exactly(start + length)
        if data is None:
            return None
        header: Message = json.loads(data[:start])
        arrays = []
        for name, shape in header.pop("arrays"):
            dtype = np.dtype(name)
            count = math.prod(shape)
            arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape) if count else np.zeros(shape, dtype))
            start += dtype.itemsize * count
            start += -start % WORD
        return header, arrays

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            count = self.socket.recv_into(view[filled:])
            if not count:
                return None
            filled += count
        return data


def _padded(data: bytes) -> bytes:
    """Pad with spaces to a multiple of eight bytes, which JSON allows at its end and which aligns the arrays."""
    return data + b" " * (-len(data) % WORD)


class SharedObservations:
    """Current and final observations of B environments, in memory shared by child and service."""

    def __init__(self, descriptor: int, spaces: Mapping[str, Sequence[Any]], num_envs: int) -> None:
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
                which[name] = flat.reshape((num_envs, *shape))

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
    """Holds the environments of this process and executes requests on them."""

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
        """Execute one request (``reset``, ``step`` or ``film``) and return the reply."""
        handlers = {"reset": self._reset, "step": self._step, "film": self._film}
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
        """Begin an episode; return the hash of its first state and its task. A failure goes to ``lost``."""
        with self._losing(i, env, lost):
            environment = self._environments[env]
            if environment is None:
                environment = self._environments[env] = self._make()
            self._write(self._shared.current, env, environment.reset(state))
            return state_hash(environment), environment.task
        return 0, ""

    def _step(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Execute a chunk in each environment until its episode ends; then begin the next one if requested."""
        env_ids, actions, next_state_ids = arrays
        n, C = actions.shape[:2]
        rewards, valid = np.zeros((n, C), np.float32), np.zeros(n, np.int32)
        terminated, truncated, success = (np.zeros((n, C), np.bool_) for _ in range(3))
        hashes, tasks = np.zeros(n, np.uint64), [""] * n
        lost, not_started = dict[int, str](), dict[int, str]()
        for i, env in enumerate(env_ids.tolist()):
            environment, ended = self._environments[env], False
            with self._losing(i, env, lost):
                assert environment is not None, "it was lost and not reset"
                for c in range(C):
                    observations, reward, over, cut, solved = environment.step(actions[i, c])
                    rewards[i, c], terminated[i, c], truncated[i, c], success[i, c] = reward, over, cut, solved
                    ended = over or cut
                    if ended:
                        break
                valid[i] = c + 1
                self._write(self._shared.current, env, observations)
            if i in lost:
                for column in (rewards, valid, terminated, truncated, success):
                    column[i] = 0
            elif ended:
                for name, final in self._shared.final.items():
                    final[env] = self._shared.current[name][env]
                if len(next_state_ids):
                    hashes[i], tasks[i] = self._start(i, env, int(next_state_ids[i]), not_started)
        found = {"lost": lost, "not_started": not_started, "tasks": tasks}
        return found, [rewards, terminated, truncated, success, valid, hashes]

    def _film(self, arrays: list[NDArray[Any]]) -> tuple[Message, list[NDArray[Any]]]:
        """Return the film of the newest episode of one environment."""
        environment = self._environments[int(arrays[0][0])]
        if not isinstance(environment, Filmed):
            return {"reason": "there is no camera, or the episode was lost"}, [np.zeros(0, np.uint8)]
        data, reason = environment.film()
        return {"reason": reason}, [np.frombuffer(data, np.uint8)]

    def _write(self, where: dict[str, NDArray[Any]], env: int, observations: Mapping[str, NDArray[Any]]) -> None:
        """Copy observations into the shared memory. Raises ValueError if one is not finite."""
        for name, array in where.items():
            row = array[env : env + 1]
            row[...] = observations[name]
            # The sum of squares is a fast first test; it is not finite if a number is not finite or is very large.
            if array.dtype.kind == "f" and not math.isfinite(np.vdot(row, row)) and not np.isfinite(row).all():
                row[...] = 0
                raise ValueError(f"observation '{name}' is not finite")

    def _losing(self, i: int, env: int, lost: dict[int, str]) -> _Losing:
        """Return a context that closes environment ``env`` if it raises, and records the reason at ``lost[i]``."""
        return _Losing(self._environments, i, env, lost)


class _Losing:
    """Context of ``Host._losing``; one made by ``contextmanager`` takes as long as a step of a simple simulator."""

    __slots__ = ("_env", "_environments", "_lost", "_place")

    def __init__(self, environments: list[Environment | None], place: int, env: int, lost: dict[int, str]) -> None:
        self._environments, self._place, self._env, self._lost = environments, place, env, lost

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception | SystemExit):  # a simulator may raise anything
            return False
        traceback.print_exception(error)
        self._lost[self._place] = reason_of(error)
        environment, self._environments[self._env] = self._environments[self._env], None
        if environment is not None:
            with contextlib.suppress(Exception):
                environment.close()
        return True


class Pictured:
    """Adds the observation ``image`` to an environment: uint8 [height, width, channels], the newest frame last.

    Raises:
        ValueError: the environment already has an observation of this name.
    """

    def __init__(self, inner: Filmable, *, height: int, width: int, grey: bool, frames: int) -> None:
        observed = inner.spec["observations"]
        if IMAGE in observed:
            raise ValueError(f"the environment observes an '{IMAGE}' by itself: leave environment.image out")
        self._inner, self.task, self.frames_per_s = inner, inner.task, inner.frames_per_s
        self._size, self._grey = (height, width), grey
        self._frames: deque[NDArray[np.uint8]] = deque(maxlen=frames)
        self.spec = {**inner.spec, "observations": {
            **observed, IMAGE: ([height, width, frames * (1 if grey else 3)], "uint8"),
        }}  # fmt: skip
        draw_at = getattr(inner, "draw_at", None)
        if draw_at is not None:
            times = max(1, DRAWN // max(height, width))
            draw_at(*(times * side + times * side % 2 for side in (height, width)))

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin an episode. Copies of its first frame replace the missing earlier ones."""
        observations = self._inner.reset(state_id)
        self.task = self._inner.task
        self._frames.extend([self._picture()] * (self._frames.maxlen or 1))
        return self._with_image(observations)

    def step(self, action: Any) -> Outcome:
        """Execute one action."""
        observations, reward, terminated, truncated, success = self._inner.step(action)
        self._frames.append(self._picture())
        return self._with_image(observations), reward, terminated, truncated, success

    def state(self) -> bytes:
        """See ``Environment``."""
        return self._inner.state()

    def render(self) -> NDArray[np.uint8]:
        """Return the newest frame, enlarged, as [H, W, 3] with even sides."""
        frame = self._frames[-1]
        times = max(1, SHOWN // max(self._size) // 2) * 2
        colours: NDArray[np.uint8] = np.repeat(frame, 3, axis=2) if self._grey else frame
        return colours.repeat(times, axis=0).repeat(times, axis=1)

    def close(self) -> None:
        """See ``Environment``."""
        self._inner.close()

    def _picture(self) -> NDArray[np.uint8]:
        small = shrunk(self._inner.render(), *self._size)
        if not self._grey:
            return small
        grey: NDArray[np.uint8] = ((small @ BRIGHTNESS + 500) // 1000).astype(np.uint8)[..., None]
        return grey

    def _with_image(self, observations: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        return {**observations, IMAGE: np.concatenate(self._frames, axis=2)}


def shrunk(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Downscale an image [H, W, 3] to [height, width, 3]; each pixel is the rounded mean of the pixels it covers.

    Raises:
        ValueError: the image is smaller than the result.
    """
    H, W = picture.shape[:2]
    if (height, width) == (H, W):
        return picture.copy()  # a renderer may draw into the same memory again
    if height > H or width > W:
        raise ValueError(f"the simulator draws {H} x {W} pixels: environment.image has no room for {height} x {width}")
    rows, columns = np.arange(height) * H // height, np.arange(width) * W // width
    sums = np.add.reduceat(np.add.reduceat(picture, rows, axis=0, dtype=np.uint32), columns, axis=1)
    areas = np.diff(rows, append=H)[:, None, None] * np.diff(columns, append=W)[None, :, None]
    means: NDArray[np.uint8] = ((sums + areas // 2) // areas).astype(np.uint8)
    return means


class Filmed:
    """Films the episodes of an environment. A failing camera only affects the film."""

    def __init__(self, inner: Filmable) -> None:
        self._inner, self.spec, self.task = inner, inner.spec, inner.task
        longest = (self.spec["max_episode_steps"] or 0) / MOST_FRAMES
        self._stride = max(1, round(inner.frames_per_s / (2 * FRAMES_PER_S)), math.ceil(longest))
        self._steps = self._frames = 0
        self._file: Any = None
        self._writer: Generator[None, Any, None] | None = None
        self._last: NDArray[np.uint8] | None = None
        self._problem = "no episode was begun"

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin an episode and its film."""
        observations = self._inner.reset(state_id)
        self.task = self._inner.task
        self._end()
        self._steps, self._frames, self._problem = 0, 0, ""
        self._shoot()
        return observations

    def step(self, action: Any) -> Outcome:
        """Execute one action."""
        outcome = self._inner.step(action)
        self._steps += 1
        if outcome[2] or outcome[3] or self._steps % self._stride == 0:
            self._shoot()
        return outcome

    def state(self) -> bytes:
        """See ``Environment``."""
        return self._inner.state()

    def film(self) -> tuple[bytes, str]:
        """End the film; return it as an MP4 file, and the reason if there is none, or ''."""
        data = b""
        if not self._problem:
            for _ in range(LAST_FRAMES):
                self._add(self._last)
        if not self._problem and self._writer is not None:
            try:
                self._writer.close()
                self._writer = None
                data = Path(self._file.name).read_bytes()
                if len(data) > MOST_FILM_BYTES:
                    self._problem = f"the film takes {len(data)} bytes, more than {MOST_FILM_BYTES}"
            except (Exception, SystemExit) as error:  # the encoder may raise anything
                self._problem = reason_of(error)
        problem = self._problem
        self._end()
        self._problem = problem or "the film was fetched"
        return (b"", problem) if problem else (data, "")

    def close(self) -> None:
        """See ``Environment``."""
        self._end()
        self._inner.close()

    def _shoot(self) -> None:
        """Render the current state and add it to the film; skipped after a failure or beyond MOST_FRAMES."""
        if self._problem or self._frames >= MOST_FRAMES:
            return
        try:
            self._last = np.ascontiguousarray(self._inner.render())
        except (Exception, SystemExit) as error:  # a renderer may raise anything
            traceback.print_exc()
            self._problem = f"the camera fails: {reason_of(error)}"
            return
        self._frames += 1
        self._add(self._last)

    def _add(self, frame: NDArray[np.uint8] | None) -> None:
        if self._problem or frame is None:
            return
        try:
            if self._writer is None:
                self._open(frame)
            assert self._writer is not None
            self._writer.send(frame)
        except (Exception, SystemExit) as error:  # the encoder may raise anything
            traceback.print_exc()
            self._problem = reason_of(error)

    def _open(self, frame: NDArray[np.uint8]) -> None:
        """Start the encoder: H.264 with the index at the front, which browsers can play while it downloads."""
        try:
            import imageio_ffmpeg  # type: ignore[import-untyped]
        except ImportError:
            raise ValueError("films need imageio-ffmpeg in the simulator's interpreter") from None
        self._file = tempfile.NamedTemporaryFile(suffix=".mp4")  # noqa: SIM115  the file stays open until it is read
        self._writer = imageio_ffmpeg.write_frames(
            self._file.name, (frame.shape[1], frame.shape[0]), fps=FRAMES_PER_S, codec="libx264", macro_block_size=2,
            quality=None, ffmpeg_log_level="error",
            output_params=["-crf", "24", "-threads", "1", "-movflags", "+faststart"],
        )  # fmt: skip
        self._writer.send(None)

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = self._last = None


def choose_renderer() -> None:
    """Set MUJOCO_GL to a renderer of the GPU, or else of the CPU, unless it is set already."""
    if "MUJOCO_GL" in os.environ:
        return
    if Path("/dev/nvidia0").exists() and ctypes.util.find_library("EGL"):
        os.environ["MUJOCO_GL"] = "egl"
    elif ctypes.util.find_library("OSMesa"):
        os.environ["MUJOCO_GL"] = "osmesa"
    elif ctypes.util.find_library("EGL_mesa"):
        os.environ["MUJOCO_GL"] = "egl"


def state_hash(environment: Environment) -> int:
    """Return a 64-bit hash of the simulator's state."""
    return int.from_bytes(hashlib.blake2b(environment.state(), digest_size=8).digest(), "little")


def reason_of(error: BaseException) -> str:
    """Return the type and message of an error, at most MAX_REASON characters."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


def load_backend(
    path: str, *, camera: bool = False, picture: Message | None = None
) -> Callable[[str, Message], Environment]:
    """Load an adapter file; return its ``make``, or ``make_with_camera`` wrapped for films and images.

    Args:
        camera: film every episode.
        picture: arguments of ``Pictured``; None: the environments do not observe images.

    Raises:
        ValueError: the file is not a Python file, or lacks the function.
    """
    found = importlib.util.spec_from_file_location(f"penstock_backend_{Path(path).stem}", path)
    if found is None or found.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    draws = camera or picture is not None
    name = "make_with_camera" if draws else "make"
    make: Callable[[str, Message], Any] | None = getattr(module, name, None)
    if make is None:
        missing = f"{path} has no function make(env_id, options)"
        raise ValueError("this simulator's adapter has no camera" if draws else missing)
    seen = make if picture is None else (lambda env_id, options: Pictured(make(env_id, options), **picture))
    return (lambda env_id, options: Filmed(seen(env_id, options))) if camera else seen


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
        if options["camera"] or options["picture"]:
            choose_renderer()
        make = load_backend(backend, camera=options["camera"], picture=options["picture"])
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
        except (Exception, SystemExit) as error:  # the service gets the error and decides
            traceback.print_exc()
            header, arrays = {"error": reason_of(error)}, []
        channel.send(header, *arrays)
    host.close()


if __name__ == "__main__":
    main(sys.argv[1:])
