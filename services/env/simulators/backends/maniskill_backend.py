"""Adapter of ManiSkill 3: manipulation and control tasks on SAPIEN. ``env_id`` is the task, such as ``PushCube-v1``.

The state id is the seed of the episode. Without a camera, nothing is rendered and no Vulkan driver is needed: the
library creates materials even without a renderer, so this adapter replaces them by dummies. The physics stays equal bit
for bit. With a camera, materials are real and Vulkan is required: a GPU driver, or lavapipe of Mesa 25 or newer.

``ManiSkillEnvironment`` is one environment on the CPU. With the option ``sim_backend: physx_cuda``, a GPU simulates all
environments of a process in one scene, ``ManiSkillBatch``; it has neither a camera nor snapshots.

Options: ``sim_backend`` (``physx_cpu``, ``physx_cuda``, or ``physx_cuda:1`` for another GPU), ``horizon`` (steps until
an episode is truncated; default: the task's), ``on_success`` (below), and the keyword arguments of the task, such as
``control_mode``, ``reward_mode``, ``robot_uids`` and ``sim_config``.

``on_success``: ``terminate`` ends the episode without bootstrapping; ``truncate`` ends it like a time limit, so that
the value of its last observation is bootstrapped, as in the library's PPO; ``continue`` runs it to the horizon.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ManiSkillBatch", "ManiSkillEnvironment", "make", "make_batch", "make_with_camera"]

ON_SUCCESS = ("terminate", "truncate", "continue")
MATERIALS = ("RenderMaterial", "RenderTexture2D")
MAX_SEED = 2**31
"""Upper bound of seeds for the library's generators; larger state ids wrap around."""
Outcome = tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]
CPU = "physx_cpu"
SIM_BACKENDS = re.compile(r"physx_cpu|physx_cuda(:\d+)?")
TOLERANCE = 1e-3
"""Difference up to which two starts on a GPU count as equal. The environments of a scene lie metres apart, so their
positions are rounded differently."""
MOST_STARTS = 4096
"""Number of state ids whose starts a batch remembers."""

torch.set_num_threads(1)  # the tensors of one environment are small


class ManiSkillEnvironment:
    """One environment on the CPU. Observation ``state``: float32 [D] of robot, objects and goal."""

    def __init__(
        self, env_id: str, *, camera: bool = False, horizon: int | None = None, on_success: str = "terminate",
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Create the environment. Raises ValueError for a missing task or assets, or unsupported options or spaces."""
        check_ends(horizon, on_success)
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
            "versions": versions(),
            "snapshots": True,
        }

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin the episode with seed ``state_id``."""
        self._state_id, self._actions = state_id, []
        return _state(self._env.reset(seed=state_id % MAX_SEED)[0])

    def step(self, action: Any) -> Outcome:
        """Execute one action, which the library clips to the bounds of the action space."""
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
        """Repeat the episode up to the snapshot, which takes as long as the repeated steps."""
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


class ManiSkillBatch:
    """N environments in one scene. Observations, options and ends of episodes are those of ``ManiSkillEnvironment``.

    A step of the library moves the whole scene, and a reset sets the targets of all controllers. If a request leaves
    out an environment with a running episode, its state is stored first, and put back before its next step: poses,
    velocities and targets of controllers, but not what PhysX keeps about contacts, nor what a task counts by itself.

    The library draws the starts of all environments that are reset together from the first seed. So each environment
    is reset on its own, and the state id alone determines its start.

    Args:
        env_id: task.
        num_envs: N.
        sim_backend: ``physx_cuda``, or ``physx_cpu`` with one environment.
        horizon: as in ``ManiSkillEnvironment``; also ``on_success`` and ``arguments``.

    Raises:
        ValueError: the task or its assets are missing, options or spaces are not supported, or the state id does not
            determine the objects of the task.
    """

    def __init__(
        self, env_id: str, num_envs: int, *, sim_backend: str = CPU, horizon: int | None = None,
        on_success: str = "terminate", **arguments: Any,
    ) -> None:  # fmt: skip
        check_ends(horizon, on_success)
        task = task_of(env_id, camera=False)
        if builds_by_seed(task.cls):
            raise ValueError(
                f"'{env_id}' builds other objects for other seeds, but the scene of a GPU is built once: "
                "leave sim_backend out"
            )
        defaults: dict[str, Any] = {"obs_mode": "state", "render_backend": "none"}
        self._env: Any = task.make(num_envs=num_envs, sim_backend=sim_backend, **{**defaults, **arguments})
        spaces = spaces_of(env_id, self._env)
        self._num_envs = num_envs
        self._horizon, self._on_success = horizon or task.max_episode_steps, on_success
        self._stored: Any = self._scene()
        """States of the environments where ``_waiting_N`` is True."""
        if any(len(leaf) != num_envs for leaf in _tensors(self._stored)):
            raise ValueError(f"'{env_id}' has objects that are not in each environment: leave sim_backend out")
        self._running_N = np.zeros(num_envs, np.bool_)
        self._waiting_N = np.zeros(num_envs, np.bool_)
        self._steps_N = np.zeros(num_envs, np.int64)
        self._state_ids_N = np.zeros(num_envs, np.int64)
        self._variants_N = np.zeros(num_envs, np.int64)
        """For each running episode, the index of its first observation in ``_starts`` of its state id."""
        self._starts: dict[int, list[NDArray[np.float32]]] = {}
        """Different first observations by state id; more than one if the state id does not determine the initial state
        of an episode."""
        self.task = words_of(env_id)
        low, high = (np.asarray(spaces[bound], np.float32) for bound in ("low", "high"))
        self._still_A = np.clip(0, low, high)
        self.spec = {
            **spaces,
            "max_episode_steps": self._horizon,
            "has_success": "success" in self._env.get_info(),
            "versions": {**versions(), "sim_backend": sim_backend.partition(":")[0]},
            "snapshots": False,
        }

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Begin the episodes with the seeds ``state_ids``, one after another."""
        self._wait(self._running_N & ~self._named(env_ids))  # a reset sets the targets of all controllers
        started = zip(env_ids.tolist(), state_ids.tolist(), strict=True)
        return {"state": np.stack([self._begin(env, state_id) for env, state_id in started])}

    def step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any]
    ) -> tuple[Mapping[str, NDArray[Any]], Any, Any, Any, Any]:
        """Execute one action in each of ``env_ids``; the library clips actions to the bounds of the action space."""
        named_N = self._named(env_ids)
        self._continue(named_N & self._waiting_N)
        self._wait(self._running_N & ~named_N)
        actions_NA = np.tile(self._still_A, (self._num_envs, 1))
        actions_NA[env_ids] = actions
        seen, rewards, _, _, info = self._env.step(torch.from_numpy(actions_NA).to(self._env.device))
        self._steps_N[env_ids] += 1
        success, failed = (
            _numbers(info[name])[env_ids].astype(np.bool_) if name in info else np.zeros(len(env_ids), np.bool_)
            for name in ("success", "fail")
        )
        late = self._steps_N[env_ids] >= (self._horizon or np.inf)
        over = failed | success if self._on_success == "terminate" else failed
        cut = ~over & (late | success if self._on_success == "truncate" else late)
        self._running_N[env_ids[over | cut]] = False
        return {"state": _numbers(seen)[env_ids]}, _numbers(rewards)[env_ids], over, cut, success

    def states(self, env_ids: NDArray[np.int32]) -> list[bytes]:
        """Return, for each episode, its state id, its number of steps, and the index of its first observation among
        those seen for this state id. A state id has several first observations if it does not determine the initial
        state.

        Poses are not part of it: on a GPU they differ in the last bits between the environments of a scene.
        """
        columns = (self._state_ids_N, self._steps_N, self._variants_N)
        return [struct.pack("<qqq", *(column[env] for column in columns)) for env in env_ids.tolist()]

    def close(self) -> None:
        """Close the scene."""
        self._env.close()

    def _begin(self, env: int, state_id: int) -> NDArray[np.float32]:
        """Begin an episode; return its first observation."""
        seeds = [state_id % MAX_SEED] * self._num_envs  # the library takes the first, or one for each environment
        seen, _ = self._env.reset(seed=seeds, options={"env_idx": torch.tensor([env], device=self._env.device)})
        start = np.asarray(_numbers(seen)[env], np.float32)
        self._running_N[env], self._waiting_N[env] = True, False
        self._state_ids_N[env], self._steps_N[env] = state_id, 0
        self._variants_N[env] = self._variant(state_id, start)
        return start

    def _variant(self, state_id: int, start: NDArray[np.float32]) -> int:
        """Return the index of the first observation ``start`` among those seen for ``state_id``; add it if it differs
        from all of them."""
        if state_id not in self._starts and len(self._starts) >= MOST_STARTS:
            del self._starts[next(iter(self._starts))]
        known = self._starts.setdefault(state_id, [])
        for number, one in enumerate(known):
            if np.allclose(one, start, rtol=TOLERANCE, atol=TOLERANCE):
                return number
        known.append(start)
        return len(known) - 1

    def _wait(self, rows_N: NDArray[np.bool_]) -> None:
        """Store the states of environments whose episodes wait while others are stepped or reset; those that already
        wait keep their stored states."""
        rows_N = rows_N & ~self._waiting_N
        if rows_N.any():
            _copy_rows(self._stored, self._scene(), self._index(rows_N))
            self._waiting_N |= rows_N

    def _continue(self, rows_N: NDArray[np.bool_]) -> None:
        """Put back the stored states of environments."""
        if rows_N.any():
            index = self._index(rows_N)
            self._env.set_state_dict(_rows(self._stored["scene"], index), index)
            agent = self._env.agent
            targets = _cloned(agent.get_controller_state())
            _copy_rows(targets, self._stored["targets"], index)
            agent.set_controller_state(targets)
            self._waiting_N &= ~rows_N

    def _scene(self) -> Any:
        """Return a copy of the states of all environments."""
        agent = self._env.agent
        return _cloned({"scene": self._env.get_state_dict(), "targets": agent.get_controller_state()})

    def _named(self, env_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        named_N = np.zeros(self._num_envs, np.bool_)
        named_N[env_ids] = True
        return named_N

    def _index(self, rows_N: NDArray[np.bool_]) -> Any:
        return torch.from_numpy(np.flatnonzero(rows_N)).to(self._env.device)


def make(env_id: str, options: dict[str, Any]) -> ManiSkillEnvironment:
    """Create an environment; see the module for ``options``."""
    return ManiSkillEnvironment(env_id, **options)


def make_batch(env_id: str, options: dict[str, Any], num_envs: int) -> ManiSkillBatch | None:
    """Create environments in one scene if ``options`` select a GPU; otherwise return None.

    Raises:
        ValueError: this process has no GPU, or the environments cannot be created.
    """
    if not on_gpu(options):
        return None
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        raise ValueError(
            f"sim_backend {options['sim_backend']} needs an NVIDIA GPU, and PyTorch {torch.__version__} of this "
            f"interpreter, built for {built}, finds none: leave sim_backend out to simulate on the CPU"
        )
    return ManiSkillBatch(env_id, num_envs, **options)


def on_gpu(options: dict[str, Any]) -> bool:
    """Return True if ``options`` select a GPU for the physics. Raises ValueError for an unknown ``sim_backend``."""
    backend = options.get("sim_backend", CPU)
    if not isinstance(backend, str) or not SIM_BACKENDS.fullmatch(backend):
        raise ValueError(f"sim_backend {backend!r}: it is physx_cpu, physx_cuda, or physx_cuda:N for the GPU N")
    return backend != CPU


def make_with_camera(env_id: str, options: dict[str, Any]) -> ManiSkillEnvironment:
    """Create an environment that can render.

    Raises:
        ValueError: this host has no usable Vulkan driver, or ``options`` select a GPU for the physics.
    """
    if on_gpu(options):
        raise ValueError("sim_backend physx_cuda has neither images nor videos: leave sim_backend out")
    try:
        return ManiSkillEnvironment(env_id, camera=True, **options)
    except RuntimeError as error:
        raise ValueError(
            f"ManiSkill draws with Vulkan, and no driver here can ({error}): a GPU's driver, or Mesa's lavapipe from "
            "version 25 on, apt-get install -y libvulkan1 mesa-vulkan-drivers"
        ) from error


def check_ends(horizon: int | None, on_success: str) -> None:
    """Raise ValueError for an invalid option about the end of episodes."""
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon {horizon}: an episode has at least one step")
    if on_success not in ON_SUCCESS:
        raise ValueError(f"on_success '{on_success}': it is one of {', '.join(ON_SUCCESS)}")


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine results."""
    return {name: importlib.metadata.version(name) for name in ("mani_skill", "sapien", "torch")}


def builds_by_seed(task: type) -> bool:
    """Return True if the constructor of a task decides how often the scene is rebuilt, because the task's objects
    depend on the seed."""
    base = importlib.import_module("mani_skill.envs.sapien_env").BaseEnv
    made = [vars(one)["__init__"] for one in task.__mro__ if issubclass(one, base) and "__init__" in vars(one)]
    return any("reconfiguration_freq" in inspect.signature(one).parameters for one in made if one is not base.__init__)


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


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, dict):
        for one in tree.values():
            yield from _tensors(one)
    elif isinstance(tree, torch.Tensor):
        yield tree


def _cloned(tree: Any) -> Any:
    return {name: _cloned(one) for name, one in tree.items()} if isinstance(tree, dict) else tree.clone()


def _rows(tree: Any, index: Any) -> Any:
    return {name: _rows(one, index) for name, one in tree.items()} if isinstance(tree, dict) else tree[index]


def _copy_rows(into: Any, tree: Any, index: Any) -> None:
    """Copy the rows ``index`` of each tensor of ``tree`` to the same rows of ``into``."""
    for target, source in zip(_tensors(into), _tensors(tree), strict=True):
        target[index] = source[index]


def _numbers(tensor: Any) -> NDArray[Any]:
    found: NDArray[Any] = tensor.cpu().numpy()
    return found
