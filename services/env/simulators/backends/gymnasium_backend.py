"""Adapter of environments registered with Gymnasium (classic control, MuJoCo, or the user's). Observations: Box, or a
Dict of Box.

``env_id`` is the id in Gymnasium, prefixed with ``module:`` if a module must be imported to register it. The state id
is the seed of the episode.

Gymnasium's own environments of classic control and MuJoCo have snapshots. A user's environment has snapshots if it
defines ``snapshot()``, which returns numbers, texts and arrays in dicts, lists and tuples, and ``restore(values)``. A
wrapper may hold any state, so a wrapped environment has snapshots only if the wrapper defines both methods, too; the
wrappers that ``gymnasium.make`` adds by itself need not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

__all__ = ["GymnasiumEnvironment", "make", "make_with_camera"]

WITH_SNAPSHOTS = ("gymnasium.envs.classic_control.", "gymnasium.envs.mujoco.")
WRAPPERS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)
"""Wrappers whose whole state is in plain attributes."""
PICTURE = 256
"""Width and height of images rendered by MuJoCo, in pixels; other environments choose their size."""
PLAIN = (bool, int, float, str, type(None), np.ndarray, np.generic)
LAGGING = (
    "xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "subtree_com",
    "cinert", "cvel", "cfrc_ext", "qfrc_actuator", "sensordata",
)  # fmt: skip
"""Arrays of MuJoCo that a step computes before it moves the bodies, and that environments read after the step."""
DRAWING = frozenset({
    "render_mode", "width", "height", "camera_id", "camera_name", "screen", "screen_dim", "screen_width",
    "screen_height", "surf", "clock", "isopen", "fullpath",
})  # fmt: skip
"""Attributes that depend on how and where the environment was created, not on the episode; snapshots omit them."""
NO_LIBRARY = "no OpenGL library draws here: apt-get install -y libosmesa6 on the env workers"


class GymnasiumEnvironment:
    """One Gymnasium environment. A step is a success if its info has a true entry `success` or `is_success`, as in
    Gymnasium-Robotics. An environment does not declare these entries, so `has_success` in ``spec`` is False until the
    info of a step has one of them."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        """Create the environment. Raises ValueError if the observation or action space is not supported."""
        self._env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, disable_env_checker=True, **options)
        self.task = str(getattr(self._env.unwrapped, "task", ""))
        self._boxes = _boxes(env_id, self._env.observation_space)
        versions = {"gymnasium": gymnasium.__version__, "numpy": np.__version__}
        if hasattr(self._env.unwrapped, "mujoco_renderer"):
            versions["mujoco"] = importlib.metadata.version("mujoco")
        self.spec = {
            "observations": {name: (list(box.shape), str(box.dtype)) for name, box in self._boxes.items()},
            **_action(env_id, self._env.action_space),
            "max_episode_steps": self._env.spec.max_episode_steps if self._env.spec else None,
            "has_success": False,
            "versions": versions,
        }
        wrappers, self._inside = _unwrapped(self._env)
        self._own = hasattr(self._inside, "snapshot") and hasattr(self._inside, "restore")
        self._layers = wrappers if self._own else [*wrappers, self._inside]
        """Objects whose attributes a snapshot contains."""
        self.spec["snapshots"] = self._own or type(self._inside).__module__.startswith(WITH_SNAPSHOTS)

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin the episode with seed ``state_id``."""
        return self._named(self._env.reset(seed=state_id)[0])

    def step(self, action: Any) -> tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]:
        """Execute one action."""
        plain = int(action) if self.spec["num_actions"] is not None else action
        observation, reward, terminated, truncated, info = self._env.step(plain)
        if "success" in info or "is_success" in info:
            self.spec["has_success"] = True
        return (
            self._named(observation),
            float(reward),
            terminated,
            truncated,
            bool(info.get("success") or info.get("is_success")),
        )

    def state(self) -> bytes:
        """Return MuJoCo's time, positions and velocities, or for other environments the attribute ``state``; in both
        cases also the state of the random generator."""
        inner: Any = self._env.unwrapped
        if hasattr(inner, "data") and hasattr(inner.data, "qpos"):
            parts: list[Any] = [inner.data.time, inner.data.qpos.tobytes(), inner.data.qvel.tobytes()]
        else:
            parts = [np.asarray(getattr(inner, "state", [])).astype(np.float64).tobytes()]
        return pickle.dumps([*parts, inner.np_random.bit_generator.state], protocol=4)

    def snapshot(self) -> dict[str, Any]:
        """Return the attributes of the environment and its wrappers, the physics, and the random generator.

        An environment with a method ``snapshot`` returns its own values instead of the attributes and the physics.
        """
        inner: Any = self._env.unwrapped
        values = {"layers": [*map(_plain_attributes, self._layers)], "random": inner.np_random.bit_generator.state}
        if self._own:
            return values | {"own": self._inside.snapshot()}
        if not hasattr(inner, "data"):
            return values
        physics = importlib.import_module("mujoco")
        state = np.empty(physics.mj_stateSize(inner.model, physics.mjtState.mjSTATE_INTEGRATION))
        physics.mj_getState(inner.model, inner.data, state, physics.mjtState.mjSTATE_INTEGRATION)
        return values | {"physics": state, "lagging": {name: getattr(inner.data, name) for name in LAGGING}}

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        inner: Any = self._env.unwrapped
        inner.np_random.bit_generator.state = values["random"]  # creates the generator, and its seed, in a new one
        for layer, attributes in zip(self._layers, values["layers"], strict=True):
            vars(layer).update(attributes)
        if self._own:
            self._inside.restore(values["own"])
        elif "physics" in values:
            physics = importlib.import_module("mujoco")
            physics.mj_setState(inner.model, inner.data, values["physics"], physics.mjtState.mjSTATE_INTEGRATION)
            for name, array in values["lagging"].items():
                getattr(inner.data, name)[...] = array

    @property
    def model(self) -> Any:
        """MuJoCo's model; only MuJoCo environments have one."""
        inner: Any = self._env.unwrapped
        return inner.model

    @property
    def _renderer(self) -> Any:
        """MuJoCo's renderer, or None."""
        return getattr(self._env.unwrapped, "mujoco_renderer", None)

    @property
    def frames_per_s(self) -> float:
        """Steps per second, or 20 if the environment does not declare them."""
        return float(self._env.metadata.get("render_fps") or 20)

    def draw_at(self, height: int, width: int) -> None:
        """Set the size of rendered images. Ignored except for MuJoCo, since other environments choose their size."""
        renderer = self._renderer
        if renderer is None:
            return
        renderer.height, renderer.width = height, width
        self._env.reset(seed=0)  # the first render fixes the camera on the bodies, so they must be in place
        self._env.render()

    def render(self) -> NDArray[np.uint8]:
        """Render an image [H, W, 3], cropped to even sides. Raises ValueError if the environment renders none."""
        renderer = self._renderer
        if renderer is not None and renderer.viewer is not None:  # each environment has its own context
            renderer.viewer.make_context_current()
        picture: Any = self._env.render()
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise ValueError("the environment renders no picture")
        even: NDArray[np.uint8] = picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2]
        return even

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _named(self, observation: Any) -> Mapping[str, NDArray[Any]]:
        return observation if isinstance(observation, dict) else {"state": np.asarray(observation)}


def make(env_id: str, options: dict[str, Any]) -> GymnasiumEnvironment:
    """Create an environment; ``options`` are keyword arguments of ``gymnasium.make``."""
    return GymnasiumEnvironment(env_id, options)


def make_with_camera(env_id: str, options: dict[str, Any]) -> GymnasiumEnvironment:
    """Create an environment that can render. Raises ValueError if MuJoCo has no OpenGL library on this host."""
    drawn: dict[str, Any] = {"render_mode": "rgb_array"}
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    physics = "mujoco" in str(gymnasium.spec(name).entry_point)
    if physics:
        if "MUJOCO_GL" not in os.environ:
            raise ValueError(NO_LIBRARY)
        drawn |= {"width": PICTURE, "height": PICTURE}
    environment = GymnasiumEnvironment(env_id, {**options, **drawn})
    if physics:  # shadows take most of the render time on a CPU
        quality = environment.model.vis.quality
        quality.shadowsize = quality.offsamples = 0
    return environment


def _unwrapped(env: Any) -> tuple[list[Any], Any]:
    """Return the known wrappers around an environment, the outermost first, and the environment inside of them."""
    wrappers = []
    while type(env) in WRAPPERS:
        wrappers.append(env)
        env = env.env
    return wrappers, env


def _plain_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of ``layer`` that are numbers, texts, arrays or sequences of these, except ``DRAWING``."""
    return {name: value for name, value in vars(layer).items() if name not in DRAWING and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _boxes(env_id: str, space: Any) -> dict[str, Box]:
    boxes = dict(space.spaces) if isinstance(space, Dict) else {"state": space}
    wrong = {name: one for name, one in boxes.items() if not isinstance(one, Box)}
    if wrong:
        raise ValueError(f"environment '{env_id}': observations are {space}; only Box, or a Dict of Box, is supported")
    return boxes


def _action(env_id: str, space: Any) -> dict[str, Any]:
    if isinstance(space, Discrete) and space.start == 0:
        return {"action": ([], str(space.dtype)), "num_actions": int(space.n), "low": [], "high": []}
    if isinstance(space, Box):
        low, high = space.low.ravel().tolist(), space.high.ravel().tolist()
        return {"action": (list(space.shape), str(space.dtype)), "num_actions": None, "low": low, "high": high}
    raise ValueError(f"environment '{env_id}': actions are {space}; only Discrete from 0 and Box are supported")
