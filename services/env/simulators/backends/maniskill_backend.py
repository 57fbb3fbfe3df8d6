"""ManiSkill 3: manipulation and control tasks on SAPIEN's physics. ``env_id`` is the task, such as ``PushCube-v1``.

The state id is the seed of the episode. Nothing is drawn, so no Vulkan driver is needed: the library makes materials
even where there is no renderer, and this adapter gives it ones that do nothing. Physics is the library's own, bit for
bit. An environment with a camera has real materials and needs Vulkan: a GPU's driver, or lavapipe of Mesa 25 or
newer.

Options: ``horizon`` (steps until an episode is cut off; default: the task's), ``on_success`` (below), and the keyword
arguments of the task, such as ``control_mode``, ``reward_mode``, ``robot_uids`` and ``sim_config``.

``on_success``: ``terminate`` ends the episode, with no value beyond; ``truncate`` ends it like a limit, so that the
value of its last observation counts, as the library's own PPO does; ``continue`` goes on to the horizon.
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
"""The library's generators take no larger one."""
Outcome = tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]

torch.set_num_threads(1)  # the tensors of one environment are small


class ManiSkillEnvironment:
    """One environment of one task on the CPU. Observation ``state``: float32 [D], robot, objects and goal."""

    def __init__(
        self, env_id: str, *, camera: bool = False, horizon: int | None = None, on_success: str = "terminate",
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Raises ValueError: no such task, missing assets, or actions of a kind that no policy here takes."""
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
        self._steps = 0
        self.task = words_of(env_id)
        self.spec = {
            **spaces_of(env_id, self._env),
            "max_episode_steps": self._horizon,
            "has_success": "success" in self._env.get_info(),
            "versions": {name: importlib.metadata.version(name) for name in ("mani_skill", "sapien", "torch")},
        }

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin the episode of this seed."""
        self._steps = 0
        return _state(self._env.reset(seed=state_id % MAX_SEED)[0])

    def step(self, action: Any) -> Outcome:
        """Execute one action; the library cuts it to its bounds."""
        observation, reward, _, _, info = self._env.step(action)
        self._steps += 1
        success, failed = (bool(info[name][0]) if name in info else False for name in ("success", "fail"))
        over = failed or (success and self._on_success == "terminate")
        late = self._horizon is not None and self._steps >= self._horizon
        cut = not over and (late or (success and self._on_success == "truncate"))
        return _state(observation), float(reward[0]), over, cut, success

    def state(self) -> bytes:
        """Poses and velocities of all bodies and joints, what the controllers aim at, and the number of steps."""
        return struct.pack("<q", self._steps) + b"".join(_leaves(self._env.get_state_dict()))

    @property
    def frames_per_s(self) -> float:
        """Steps in a second of the simulator's time."""
        return float(self._env.control_freq)

    def render(self) -> NDArray[np.uint8]:
        """A picture [512, 512, 3]; only of what ``make_with_camera`` made."""
        picture: NDArray[np.uint8] = self._env.render()[0].cpu().numpy()
        return picture

    def close(self) -> None:
        """Close it."""
        self._env.close()


def make(env_id: str, options: dict[str, Any]) -> ManiSkillEnvironment:
    """One environment; ``options`` as above."""
    return ManiSkillEnvironment(env_id, **options)


def make_with_camera(env_id: str, options: dict[str, Any]) -> ManiSkillEnvironment:
    """The same, ready to render. Raises ValueError: no Vulkan driver draws here."""
    try:
        return ManiSkillEnvironment(env_id, camera=True, **options)
    except RuntimeError as error:
        raise ValueError(
            f"ManiSkill draws with Vulkan, and no driver here can ({error}): a GPU's driver, or Mesa's lavapipe from "
            "version 25 on, apt-get install -y libvulkan1 mesa-vulkan-drivers"
        ) from error


def task_of(env_id: str, *, camera: bool) -> Any:
    """The library's entry of a task. Raises ValueError: there is none."""
    if not camera:
        replace_materials()  # also what the library imports in the next line
    importlib.import_module("mani_skill.envs")
    if not camera:
        replace_materials()
    importlib.import_module("mani_skill.utils.download_asset").prompt_yes_no = refuse_download  # type: ignore[attr-defined]
    tasks = importlib.import_module("mani_skill.utils.registration").REGISTERED_ENVS
    if env_id not in tasks:
        raise ValueError(f"ManiSkill has no task '{env_id}'; it has: {', '.join(sorted(tasks))}")
    return tasks[env_id]


def refuse_download(question: str) -> NoReturn:
    """Stands where the library asks on the terminal. Raises ValueError with what it asked."""
    command = f"{sys.executable} -m mani_skill.utils.download_asset TASK, with the name of the task or the asset"
    raise ValueError(f"assets are missing: {question.strip()} On the env workers: {command}")


class NoMaterial:
    """Stands for a material or a texture where nothing is drawn; takes any setting."""

    def __init__(self, *_: Any, **settings: Any) -> None:
        self.__dict__.update(settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def replace_materials() -> None:
    """Put ``NoMaterial`` in the place of SAPIEN's materials, also where modules have imported them by name."""
    importlib.import_module("sapien.render")
    importlib.import_module("sapien.wrapper.urdf_loader")
    modules = [one for name, one in sys.modules.items() if name.split(".")[0] in ("sapien", "mani_skill")]
    for module in modules:
        for name in MATERIALS:
            if isinstance(vars(module).get(name), type):
                setattr(module, name, NoMaterial)


def spaces_of(env_id: str, env: Any) -> dict[str, Any]:
    """Observations and actions of one environment. Raises ValueError where its actions are no vector."""
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
    """``PushCube-v1`` in words: push cube."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", env_id.rpartition("-v")[0])).lower()


def _state(observation: Any) -> Mapping[str, NDArray[Any]]:
    return {"state": observation[0].cpu().numpy()}


def _leaves(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from _leaves(tree[name])
    elif isinstance(tree, torch.Tensor):
        yield tree.cpu().numpy().tobytes()
