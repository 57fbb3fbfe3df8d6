"""Adapter of ManiSkill 3: manipulation and control tasks on SAPIEN. ``env_id`` is the task, such as ``PushCube-v1``.

The state id is the seed of the episode. Without a camera, nothing is rendered and no Vulkan driver is needed: the
library creates materials even without a renderer, so this adapter replaces them by dummies. The physics stays equal bit
for bit. With a camera, materials are real and Vulkan is required: a GPU driver, or lavapipe of Mesa 25 or newer.

Options: ``horizon`` (steps until an episode is truncated; default: the task's), ``on_success`` (below), and the keyword
arguments of the task, such as ``control_mode``, ``reward_mode``, ``robot_uids`` and ``sim_config``.

``on_success``: ``terminate`` ends the episode without bootstrapping; ``truncate`` ends it like a time limit, so that
the value of its last observation is bootstrapped, as in the library's PPO; ``continue`` runs it to the horizon.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ManiSkillEnvironment", "make", "make_with_camera"]

ON_SUCCESS = ("terminate", "truncate", "continue")
MATERIALS = ("RenderMaterial", "RenderTexture2D")
MAX_SEED = 2**31
"""Upper bound of seeds for the library's generators; larger state ids wrap around."""
Outcome = tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]

torch.set_num_threads(1)  # the tensors of one environment are small


class ManiSkillEnvironment:
    """One environment on the CPU. Observation ``state``: float32 [D] of robot, objects and goal."""

    def __init__(
        self, env_id: str, *, camera: bool = False, horizon: int | None = None, on_success: str = "terminate",
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Create the environment. Raises ValueError for a missing task or assets, or unsupported options or spaces."""
        if horizon is not None and horizon < 1:
            raise ValueError(f"horizon {horizon}: an episode has at least one step")
        if on_success not in ON_SUCCESS:
            raise ValueError(f"on_success '{on_success}': it is one of {', '.join(ON_SUCCESS)}")
        task = task_of(env_id, camera=camera)
        backend = ("gpu" if Path("/dev/nvidia0").exists() else "cpu") if camera else "none"
        drawn = {"render_mode": "rgb_array"} if camera else {}
        defaults: dict[str, Any] = {"obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": backend, **drawn}
        self._env: Any = task.make(num_envs=1, **{**defaults, **arguments})
        self._horizon, self._on_success = horizon or task.max_episode_steps, on_success
        self._state_id = 0
        self._actions: list[NDArray[np.float32]] = []
        """Actions of the episode so far."""
        self.task = words_of(env_id)
        self.spec = {
            **spaces_of(env_id, self._env),
            "max_episode_steps": self._horizon,
            "has_success": "success" in self._env.get_info(),
            "versions": {name: importlib.metadata.version(name) for name in ("mani_skill", "sapien", "torch")},
            "snapshots": True,
        }

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin the episode with seed ``state_id``."""
        self._state_id, self._actions = state_id, []
        return _state(self._env.reset(seed=state_id % MAX_SEED)[0])

    def step(self, action: Any) -> Outcome:
        """Execute one action, which the library clips to its bounds."""
        self._actions.append(np.array(action, np.float32))
        observation, reward, _, _, info = self._env.step(action)
        success, failed = (bool(info[name][0]) if name in info else False for name in ("success", "fail"))
        over = failed or (success and self._on_success == "terminate")
        late = self._horizon is not None and len(self._actions) >= self._horizon
        cut = not over and (late or (success and self._on_success == "truncate"))
        return _state(observation), float(reward[0]), over, cut, success

    def state(self) -> bytes:
        """Return the number of steps, poses and velocities of all bodies and joints, and controller targets."""
        return struct.pack("<q", len(self._actions)) + b"".join(_leaves(self._env.get_state_dict()))

    def snapshot(self) -> dict[str, Any]:
        """Return the seed and the actions so far.

        The library's ``get_state_dict`` lacks what PhysX keeps from step to step: after ``set_state_dict`` the next
        observations differ in the last bits.
        """
        return {"state_id": self._state_id, "actions": self._actions}

    def restore(self, values: dict[str, Any]) -> None:
        """Repeat the episode up to the snapshot, which takes as long as its steps did."""
        self.reset(values["state_id"])
        for action in values["actions"]:
            self.step(action)

    @property
    def frames_per_s(self) -> float:
        """Steps per second of simulated time."""
        return float(self._env.control_freq)

    def render(self) -> NDArray[np.uint8]:
        """Render an image [512, 512, 3]. Only for environments of ``make_with_camera``."""
        picture: NDArray[np.uint8] = self._env.render()[0].cpu().numpy()
        return picture

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def make(env_id: str, options: dict[str, Any]) -> ManiSkillEnvironment:
    """Create an environment; see the module for ``options``."""
    return ManiSkillEnvironment(env_id, **options)


def make_with_camera(env_id: str, options: dict[str, Any]) -> ManiSkillEnvironment:
    """Create an environment that can render. Raises ValueError if this host has no usable Vulkan driver."""
    try:
        return ManiSkillEnvironment(env_id, camera=True, **options)
    except RuntimeError as error:
        raise ValueError(
            f"ManiSkill draws with Vulkan, and no driver here can ({error}): a GPU's driver, or Mesa's lavapipe from "
            "version 25 on, apt-get install -y libvulkan1 mesa-vulkan-drivers"
        ) from error


def task_of(env_id: str, *, camera: bool) -> Any:
    """Return the library's registry entry of a task. Raises ValueError if there is none."""
    if not camera:
        replace_materials()  # before the next import uses them
    importlib.import_module("mani_skill.envs")
    if not camera:
        replace_materials()
    importlib.import_module("mani_skill.utils.download_asset").prompt_yes_no = refuse_download  # type: ignore[attr-defined]
    tasks = importlib.import_module("mani_skill.utils.registration").REGISTERED_ENVS
    if env_id not in tasks:
        raise ValueError(f"ManiSkill has no task '{env_id}'; it has: {', '.join(sorted(tasks))}")
    return tasks[env_id]


def refuse_download(question: str) -> NoReturn:
    """Raise ValueError instead of the library's prompt to download assets."""
    command = f"{sys.executable} -m mani_skill.utils.download_asset TASK, with the name of the task or the asset"
    raise ValueError(f"assets are missing: {question.strip()} On the env workers: {command}")


class NoMaterial:
    """Dummy material or texture that accepts any setting, used when nothing is rendered."""

    def __init__(self, *_: Any, **settings: Any) -> None:
        self.__dict__.update(settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def replace_materials() -> None:
    """Replace SAPIEN's materials by ``NoMaterial``, also in modules that imported them by name."""
    importlib.import_module("sapien.render")
    importlib.import_module("sapien.wrapper.urdf_loader")
    modules = [one for name, one in sys.modules.items() if name.split(".")[0] in ("sapien", "mani_skill")]
    for module in modules:
        for name in MATERIALS:
            if isinstance(vars(module).get(name), type):
                setattr(module, name, NoMaterial)


def spaces_of(env_id: str, env: Any) -> dict[str, Any]:
    """Return the spaces of an environment for its spec. Raises ValueError unless each is one Box."""
    actions, observations = env.single_action_space, env.single_observation_space
    if not hasattr(actions, "low") or not hasattr(observations, "low"):
        raise ValueError(f"'{env_id}': actions are {actions}; tasks of several robots are not supported")
    return {
        "observations": {"state": (list(observations.shape), "float32")},
        "action": (list(actions.shape), "float32"),
        "num_actions": None,
        "low": actions.low.ravel().tolist(),
        "high": actions.high.ravel().tolist(),
    }


def words_of(env_id: str) -> str:
    """Return the words of a task id: ``PushCube-v1`` -> ``push cube``."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", env_id.rpartition("-v")[0])).lower()


def _state(observation: Any) -> Mapping[str, NDArray[Any]]:
    return {"state": observation[0].cpu().numpy()}


def _leaves(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from _leaves(tree[name])
    elif isinstance(tree, torch.Tensor):
        yield tree.cpu().numpy().tobytes()
