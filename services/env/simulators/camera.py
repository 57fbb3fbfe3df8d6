"""Cameras of environments in a child process: images as observations, and films of episodes.

``child.py`` loads this file if a session asks for a camera or an image. Like the adapters, this file imports only the
standard library and NumPy, and imageio-ffmpeg for films.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import math
import os
import tempfile
import traceback
from collections import deque
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # an interpreter of simulators does not have the package
    from penstock.services.env.simulators.interfaces import Filmable, Outcome, Values

__all__ = ["Filmed", "Pictured", "choose_renderer", "shrunk"]

FRAMES_PER_S = 20
"""Frame rate of films. If an episode is long, or a simulator has three times this rate or more, the film skips
steps."""
MOST_FRAMES = 600
LAST_FRAMES = 20
"""Number of frames that repeat the last image at the end of a film."""
MOST_FILM_BYTES = 4 << 20
DRAWN = 128
"""Approximate longer side (pixels) of rendered images for the observation ``image``; a smaller observation is
downscaled from this size, which smooths edges."""
SHOWN = 256
"""Approximate longer side of films (pixels) that show the observation ``image``."""
BRIGHTNESS = np.array([299, 587, 114], np.uint32)
"""Weights of red, green and blue in gray, in thousandths (ITU-R BT.601)."""
IMAGE = "image"


class Pictured:
    """Adds the observation ``image`` to an environment: uint8 [height, width, channels of all frames], the newest frame
    last.

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
        self._observed = {**observed, IMAGE: ([height, width, frames * (1 if grey else 3)], "uint8")}
        draw_at = getattr(inner, "draw_at", None)
        if draw_at is not None:
            times = max(1, DRAWN // max(height, width))
            draw_at(*(times * side + times * side % 2 for side in (height, width)))

    @property
    def spec(self) -> dict[str, Any]:
        """Properties of the environment with the image; see ``Environment``."""
        return {**self._inner.spec, "observations": self._observed}

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin an episode. Copies of its first frame stand in for the earlier frames of the image."""
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
        """Return the full state of the simulator; see ``Environment``."""
        return self._inner.state()

    def snapshot(self) -> Values:
        """Return the snapshot of the environment, and the frames; see ``Restorable``."""
        return {"inner": self._inner.snapshot(), "frames": list(self._frames)}

    def restore(self, values: Values) -> None:
        """Continue from a snapshot; see ``Restorable``."""
        self._inner.restore(values["inner"])
        self.task = self._inner.task
        self._frames.extend(values["frames"])

    def render(self) -> NDArray[np.uint8]:
        """Return the newest frame, enlarged, as [H, W, 3] with even sides."""
        frame = self._frames[-1]
        times = max(1, SHOWN // max(self._size) // 2) * 2
        colours: NDArray[np.uint8] = np.repeat(frame, 3, axis=2) if self._grey else frame
        return colours.repeat(times, axis=0).repeat(times, axis=1)

    def close(self) -> None:
        """Close the environment."""
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
        self._begin()
        return observations

    def step(self, action: Any) -> Outcome:
        """Execute one action."""
        outcome = self._inner.step(action)
        self._steps += 1
        if outcome[2] or outcome[3] or self._steps % self._stride == 0:
            self._shoot()
        return outcome

    def state(self) -> bytes:
        """Return the full state of the simulator; see ``Environment``."""
        return self._inner.state()

    def snapshot(self) -> Values:
        """Return the snapshot of the environment, without the film; see ``Restorable``."""
        return self._inner.snapshot()

    def restore(self, values: Values) -> None:
        """Continue from a snapshot with a new film; see ``Restorable``."""
        self._inner.restore(values)
        self._begin()

    def film(self) -> tuple[bytes, str]:
        """End the film; return ``(film as MP4, '')``, or ``(b"", reason)`` if there is none."""
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
                self._problem = _reason_of(error)
        problem = self._problem
        self._end()
        self._problem = problem or "the film was fetched"
        return (b"", problem) if problem else (data, "")

    def close(self) -> None:
        """Discard the film and close the environment."""
        self._end()
        self._inner.close()

    def _begin(self) -> None:
        """Begin the film of an episode that has begun."""
        self.task = self._inner.task
        self._end()
        self._steps, self._frames, self._problem = 0, 0, ""
        self._shoot()

    def _shoot(self) -> None:
        """Render the current state and add it to the film; skipped after a failure or beyond MOST_FRAMES."""
        if self._problem or self._frames >= MOST_FRAMES:
            return
        try:
            self._last = np.ascontiguousarray(self._inner.render())
        except (Exception, SystemExit) as error:  # a renderer may raise anything
            traceback.print_exc()
            self._problem = f"the camera fails: {_reason_of(error)}"
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
            self._problem = _reason_of(error)

    def _open(self, frame: NDArray[np.uint8]) -> None:
        """Start the encoder. It writes an H.264 MP4 file with the index at the front, so that browsers can play the
        film while they download it."""
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
    """Set MUJOCO_GL, unless it is set already, to a renderer on the GPU if there is one, else on the CPU."""
    if "MUJOCO_GL" in os.environ:
        return
    if Path("/dev/nvidia0").exists() and ctypes.util.find_library("EGL"):
        os.environ["MUJOCO_GL"] = "egl"
    elif ctypes.util.find_library("OSMesa"):
        os.environ["MUJOCO_GL"] = "osmesa"
    elif ctypes.util.find_library("EGL_mesa"):
        os.environ["MUJOCO_GL"] = "egl"


def _reason_of(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
