"""Adapter of Meta-World: fifty manipulation tasks of a Sawyer arm. ``env_id`` is the task, such as ``reach-v3``.

State ids 0 to 49 are the goals of the benchmark with seed 0 (``MT1(name, seed=0).train_tasks``). A higher id draws its
goal with the id as seed, because ``reset(seed=...)`` of the library does not reproduce an episode.

Options: ``horizon`` (steps until an episode is truncated, at most 500), ``terminate_on_success`` (default true),
``expert`` (default false; true adds the observation ``expert_action``, the action of the library's scripted policy).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import struct
import warnings
from collections.abc import Mapping
from typing import Any

import metaworld
import metaworld.policies
import mujoco  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

__all__ = ["MetaWorldEnvironment", "make", "make_with_camera"]

GOALS = 50
"""Number of goals in a benchmark."""
PICTURE = 256
"""Default width and height of rendered images, in pixels."""
CAMERA = {"distance": 1.7, "azimuth": 215.0, "elevation": -28.0, "lookat": np.array([0.0, 0.6, 0.15])}
PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION
"""Parts of MuJoCo's state that determine all next steps bit for bit, such as controls and the warm start."""
DRAWING = frozenset({"render_mode", "width", "height", "camera_id", "camera_name"})
"""Attributes that depend on how the environment was created, not on the episode; snapshots omit them."""
NO_LIBRARY = "no OpenGL library draws here: apt-get install -y libosmesa6 on the env workers"


class MetaWorldEnvironment:
    """One environment. Observation ``state``, float64 [39]: hand, gripper and objects, now and one step ago; goal."""

    def __init__(
        self, env_id: str, *, horizon: int = 500, terminate_on_success: bool = True, expert: bool = False
    ) -> None:
        """Create the environment. Raises ValueError if there is no such task, or the horizon is not in 1..500."""
        names = metaworld.MT1.ENV_NAMES
        if env_id not in names:
            raise ValueError(f"Meta-World has no task '{env_id}'; it has: {', '.join(sorted(names))}")
        if not 1 <= horizon <= 500:
            raise ValueError(f"horizon {horizon}: Meta-World's episodes have 1 to 500 steps")
        self._horizon, self._stops = horizon, terminate_on_success
        benchmark = benchmark_of(env_id)
        self._tasks: list[Any] = benchmark.train_tasks
        self._env: Any = benchmark.train_classes[env_id]()
        self._steps = self._state_id = 0
        warnings.filterwarnings("ignore", "Constant.s. may be too high")  # the expert's actions are clipped below
        self._expert: Any = metaworld.policies.ENV_POLICY_MAP[env_id]() if expert else None
        self.task = env_id.removesuffix("-v3").replace("-", " ")
        space = self._env.action_space
        self.spec = {
            "observations": {"state": ([39], "float64")} | ({"expert_action": ([4], "float32")} if expert else {}),
            "action": (list(space.shape), str(space.dtype)),
            "num_actions": None,
            "low": space.low.ravel().tolist(),
            "high": space.high.ravel().tolist(),
            "max_episode_steps": horizon,
            "has_success": True,
            "versions": {name: importlib.metadata.version(name) for name in ("metaworld", "mujoco")},
            "snapshots": True,
        }

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin the episode with goal ``state_id``."""
        self._env.set_task(self._tasks[state_id % GOALS])
        self._steps, self._state_id = 0, state_id
        if state_id < GOALS:
            return self._named(self._env.reset()[0])
        before = np.random.get_state()
        np.random.seed(state_id % 2**32)
        self._env._freeze_rand_vec = False  # makes the library draw the goal, from NumPy's global generator
        try:
            return self._named(self._env.reset()[0])
        finally:
            self._env._freeze_rand_vec = True
            np.random.set_state(before)

    def step(self, action: Any) -> tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]:
        """Execute one action, clipped to [-1, 1]."""
        observation, reward, _, _, info = self._env.step(np.clip(action, -1.0, 1.0))
        self._steps += 1
        success = bool(info["success"])
        over = success and self._stops
        return self._named(observation), float(reward), over, not over and self._steps >= self._horizon, success

    def _named(self, state: NDArray[np.float64]) -> Mapping[str, NDArray[Any]]:
        if self._expert is None:
            return {"state": state}
        action = np.clip(self._expert.get_action(state), -1.0, 1.0).astype(np.float32)
        return {"state": state, "expert_action": action}

    def state(self) -> bytes:
        """Return time, number of steps, physics, the gripper's target, the goal, and the previous observation."""
        data = self._env.data
        parts = (data.qpos, data.qvel, data.mocap_pos, data.mocap_quat, self._env._target_pos, self._env._prev_obs)
        return struct.pack("<dq", data.time, self._steps) + b"".join(np.asarray(p, np.float64).tobytes() for p in parts)

    def snapshot(self) -> dict[str, Any]:
        """Return the state id, number of steps, physics, and the values that the library keeps between steps.

        Arrays that are views of MuJoCo's data are left out: they show the restored data after ``restore``.
        """
        physics = np.empty(mujoco.mj_stateSize(self._env.model, PHYSICS))
        mujoco.mj_getState(self._env.model, self._env.data, physics, PHYSICS)
        kept = {
            name: value
            for name, value in vars(self._env).items()
            if value is None or isinstance(value, bool | int | float | np.generic | np.ndarray)
            if name not in DRAWING and getattr(value, "base", None) is None
        }
        return {"state_id": self._state_id, "steps": self._steps, "physics": physics, "kept": kept}

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from a snapshot: begin the snapshot's episode, because its goal changes the model; then set the
        values."""
        self.reset(values["state_id"])
        model, data = self._env.model, self._env.data
        mujoco.mj_setState(model, data, values["physics"], PHYSICS)
        mujoco.mj_forward(model, data)  # the positions that views show
        mujoco.mj_setState(model, data, values["physics"], PHYSICS)  # the warm start, which that has changed
        vars(self._env).update(values["kept"])
        self._steps = values["steps"]

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    frames_per_s = 80.0

    def draw_at(self, height: int, width: int) -> None:
        """Set the size of rendered images."""
        self._env.mujoco_renderer.height, self._env.mujoco_renderer.width = height, width

    def render(self) -> NDArray[np.uint8]:
        """Render an image [256, 256, 3], or of the size set by ``draw_at``. Only after ``add_camera``."""
        renderer = self._env.mujoco_renderer
        if renderer.viewer is not None:  # each environment has its own context
            renderer.viewer.make_context_current()
        picture: NDArray[np.uint8] = self._env.render()
        return picture

    def add_camera(self) -> None:
        """Add a renderer, without shadows, which take most of the render time on a CPU."""
        from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

        env = self._env
        env.model.vis.quality.shadowsize = env.model.vis.quality.offsamples = 0
        env.render_mode = "rgb_array"
        env.mujoco_renderer = MujocoRenderer(env.model, env.data, CAMERA, width=PICTURE, height=PICTURE)


@functools.cache
def benchmark_of(name: str) -> Any:
    """Return Meta-World's benchmark of one task. Cached, because it takes half a second to create."""
    benchmark: Any = metaworld.MT1
    return benchmark(name, seed=0)


def make(env_id: str, options: dict[str, Any]) -> MetaWorldEnvironment:
    """Create an environment; ``options`` are keyword arguments of ``MetaWorldEnvironment``."""
    return MetaWorldEnvironment(env_id, **options)


def make_with_camera(env_id: str, options: dict[str, Any]) -> MetaWorldEnvironment:
    """Create an environment that can render. Raises ValueError if this host has no OpenGL library."""
    if "MUJOCO_GL" not in os.environ:
        raise ValueError(NO_LIBRARY)
    environment = make(env_id, options)
    environment.add_camera()
    return environment
