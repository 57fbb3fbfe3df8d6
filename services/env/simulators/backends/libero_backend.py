"""Adapter of LIBERO: 130 language-conditioned manipulation tasks on robosuite and MuJoCo. ``env_id`` is ``SUITE/TASK``,
with the number or name of the task: ``libero_object/0``. Suites: libero_spatial, libero_object, libero_goal, libero_10,
libero_90.

State ids 0 to 49 are initial states of the library. A higher id draws object positions from the regions of the task,
with the id as seed. Then the objects settle for ``settle_steps`` steps without an action.

The wheel contains tasks and initial states, but no meshes. Option ``assets`` names their location: a folder on the env
workers, or ``primitive`` for boxes and cylinders defined in this file, with which the ten tasks of libero_object run on
the real engine. The default is the package, where ``libero-download-assets`` puts the meshes.

Further options: ``horizon`` (default: the suite's), ``terminate_on_success`` (default true), ``settle_steps``
(default 5), and ``reach_reward`` (default 0). The library's reward is 1 for the step that solves the task, which an
untrained policy never reaches; ``reach_reward`` is the weight of a bonus ``1 - tanh(5 d)``, with the distance ``d``
in meters between the gripper and the first object of the task.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import math
import os
import pickle
import shutil
import struct
import sys
import tempfile
import types
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LiberoEnvironment", "build_primitives", "make", "make_with_camera"]

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Maximum steps of an episode by suite, slightly above the longest demonstration (code of arXiv 2406.09246)."""
NO_LIBRARY = "no OpenGL library draws here: apt-get install -y libosmesa6 on the env workers"
PICTURE = 256
"""Default width and height of rendered images, in pixels."""
PLACINGS = 100
"""Maximum attempts to place the objects without a collision."""
PRIMITIVE = "primitive"
PROPRIOCEPTION, OBJECTS = "robot0_proprio-state", "object-state"


class LiberoEnvironment:
    """One environment. Observation ``state``: float64 [D], proprioception of the arm, then poses of all objects."""

    def __init__(
        self, env_id: str, *, camera: bool = False, assets: str | None = None, horizon: int | None = None,
        terminate_on_success: bool = True, settle_steps: int = 5, reach_reward: float = 0.0,
    ) -> None:  # fmt: skip
        """Create the environment. Raises ValueError if the suite, the task or its meshes are missing."""
        library, suite, name = find_task(env_id, camera=camera)
        use_assets(library, assets, env_id)
        self._horizon, self._stops = HORIZONS[suite] if horizon is None else horizon, terminate_on_success
        if self._horizon < 1:
            raise ValueError(f"horizon {horizon}: an episode has at least one step")
        self._settle, self._reach = settle_steps, reach_reward
        self._starts = read_starts(library / "init_files" / suite / f"{name}.pruned_init")
        envs = importlib.import_module("libero.libero.envs.env_wrapper")
        try:
            control = envs.ControlEnv(
                bddl_file_name=str(library / "bddl_files" / suite / f"{name}.bddl"), use_camera_obs=False,
                has_offscreen_renderer=camera, ignore_done=True, hard_reset=False,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise ValueError(
                f"assets of '{env_id}' are missing: {error.filename}. {how_to_get_assets(suite)}"
            ) from None
        self._env: Any = control.env
        self._idle = np.append(np.zeros(6), -1.0)
        self._steps, self._size = 0, (PICTURE, PICTURE)
        self.task = str(control.language_instruction)
        low, high = self._env.action_spec
        self.spec = {
            "observations": {"state": (list(self._state(self._env._get_observations())["state"].shape), "float64")},
            "action": (list(low.shape), "float32"),
            "num_actions": None,
            "low": low.tolist(),
            "high": high.tolist(),
            "max_episode_steps": self._horizon,
            "has_success": True,
            "versions": {name: importlib.metadata.version(name) for name in ("rlinf-libero", "robosuite", "mujoco")}
            | {"assets": PRIMITIVE if assets == PRIMITIVE else "meshes"},
        }

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin an episode in initial state ``state_id``."""
        self._steps = 0
        before = np.random.get_state()  # the library draws from NumPy's global generator
        np.random.seed(state_id % 2**32)
        try:
            self._place()
        finally:
            np.random.set_state(before)
        if state_id < len(self._starts):
            self._env.sim.set_state_from_flattened(self._starts[state_id])
        self._env.sim.forward()
        self._env._post_process()
        for _ in range(self._settle):
            self._env.step(self._idle)
        self._env._update_observables(force=True)
        return self._state(self._env._get_observations())

    def step(self, action: Any) -> tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]:
        """Execute one action, clipped to [-1, 1]."""
        observation, reward, success, _ = self._env.step(np.clip(np.asarray(action, np.float64), -1.0, 1.0))
        self._steps += 1
        over = bool(success) and self._stops
        cut = not over and self._steps >= self._horizon
        if self._reach:
            reward += self._reach * self._closeness(observation)
        return self._state(observation), float(reward), over, cut, bool(success)

    def state(self) -> bytes:
        """Return the number of steps, physics, the solver's warm start, and targets of arm and gripper controllers."""
        robot, data = self._env.robots[0], self._env.sim.data
        controller = robot.controller
        parts = (self._env.sim.get_state().flatten(), data.qacc_warmstart, controller.goal_pos, controller.goal_ori)
        aims = b"".join(np.asarray(part, np.float64).tobytes() for part in (*parts, robot.gripper.current_action))
        return struct.pack("<q", self._steps) + aims

    frames_per_s = 20.0

    def draw_at(self, height: int, width: int) -> None:
        """Set the size of rendered images."""
        self._size = height, width

    def render(self) -> NDArray[np.uint8]:
        """Render an image [256, 256, 3], or of the size set by ``draw_at``. Needs ``camera``."""
        height, width = self._size
        picture: NDArray[np.uint8] = self._env.sim.render(camera_name="agentview", width=width, height=height)
        return picture[::-1]

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _place(self) -> None:
        """Reset the engine, which also samples object positions. Raises ValueError if objects collide in each of
        ``PLACINGS`` attempts."""
        failure = importlib.import_module("robosuite.utils.errors").RandomizationError
        for _ in range(PLACINGS):
            with contextlib.suppress(failure):
                self._env.reset()
                return
        raise ValueError(f"the objects find no places after {PLACINGS} attempts")

    def _state(self, observation: Any) -> Mapping[str, NDArray[Any]]:
        return {"state": np.concatenate([observation[PROPRIOCEPTION], observation[OBJECTS]])}

    def _closeness(self, observation: Any) -> float:
        wanted = self._env.obj_of_interest[0]
        place = self._env.sim.data.body_xpos[self._env.obj_body_id[wanted]]
        return 1.0 - math.tanh(5.0 * float(np.linalg.norm(place - observation["robot0_eef_pos"])))


def make(env_id: str, options: dict[str, Any]) -> LiberoEnvironment:
    """Create an environment; see the module for ``options``."""
    return LiberoEnvironment(env_id, **options)


def make_with_camera(env_id: str, options: dict[str, Any]) -> LiberoEnvironment:
    """Create an environment that can render. Raises ValueError if this host has no OpenGL library."""
    if os.environ.get("MUJOCO_GL", "disable") == "disable":
        raise ValueError(NO_LIBRARY)
    return LiberoEnvironment(env_id, camera=True, **options)


# -- the library -----------------------------------------------------------------------------------------------------


def find_task(env_id: str, *, camera: bool) -> tuple[Path, str, str]:
    """Return the library's folder, the suite, and the name of a task. Raises ValueError if there is no such task."""
    library = import_library(camera=camera)
    tasks: dict[str, list[str]] = _task_map(library / "benchmark" / "libero_suite_task_map.py")
    suite, _, wanted = env_id.partition("/")
    if suite not in HORIZONS:
        raise ValueError(
            f"LIBERO has no suite '{suite}'; a task is SUITE/NUMBER or SUITE/NAME of: {', '.join(HORIZONS)}"
        )
    names = tasks[suite]
    if wanted in names:
        return library, suite, wanted
    if wanted.isdecimal() and int(wanted) < len(names):
        return library, suite, names[int(wanted)]
    listed = "; ".join(f"{number} {name}" for number, name in enumerate(names))
    raise ValueError(f"{suite} has no task '{wanted}'; it has: {listed}")


@functools.cache
def import_library(*, camera: bool) -> Path:
    """Import LIBERO and return its folder. The import asks the user no questions, writes no files to the home folder,
    and uses no graphics unless ``camera`` is set.

    On import the library writes a configuration that only its tools read; some builds ask the user for its content.
    """
    if not camera:
        os.environ["MUJOCO_GL"] = "disable"
    settings = types.ModuleType("robosuite.macros_private")
    settings.MUJOCO_GPU_RENDERING = False  # type: ignore[attr-defined]  # else it requires EGL, even without a camera
    sys.modules["robosuite.macros_private"] = settings
    with tempfile.TemporaryDirectory(prefix="penstock-libero-") as folder:
        os.environ["LIBERO_CONFIG_PATH"] = folder
        library = importlib.import_module("libero.libero")
        importlib.import_module("libero.libero.envs")
    return Path(str(library.__file__)).parent


def _task_map(path: Path) -> Any:
    """Load the task names by suite directly from the file ``path``, because an import of its package imports
    PyTorch."""
    found = importlib.util.spec_from_file_location("libero_suite_task_map", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.libero_task_map


def read_starts(path: Path) -> NDArray[np.float64]:
    """Read the initial states [50, D] of a task: one NumPy array in PyTorch's file format."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        starts: NDArray[np.float64] = pickle.load(io.BytesIO(archive.read(name)))
    return starts


def use_assets(library: Path, assets: str | None, env_id: str) -> None:
    """Make the library read its meshes from a folder. Raises ValueError if the folder lacks them."""
    suite = env_id.partition("/")[0]
    if assets == PRIMITIVE:
        if suite != "libero_object":
            raise ValueError(f"'{env_id}': there are primitive assets for the tasks of libero_object alone")
        folder = build_primitives(Path(tempfile.gettempdir()))
    else:
        folder = library / "assets" if assets is None else Path(assets)
        if assets is not None and folder.name != "assets":  # the library's own layout
            folder = folder / "assets"
        if not (folder / "scenes").is_dir():
            raise ValueError(f"LIBERO's meshes are not in {folder}. {how_to_get_assets(suite)}")
    for module in [one for name, one in sys.modules.items() if name.startswith("libero.libero.envs.objects.")]:
        if hasattr(module, "absolute_path"):
            module.absolute_path = folder.parent  # type: ignore[attr-defined]
    domain = importlib.import_module("libero.libero.envs.bddl_base_domain")
    domain.DIR_PATH = str(folder.parent / "envs")  # type: ignore[attr-defined]  # it looks in ../assets from there


def how_to_get_assets(suite: str) -> str:
    """Return the command and the options that provide the meshes."""
    program = Path(sys.executable).with_name("libero-download-assets")
    own = f", or options: {{assets: {PRIMITIVE}}} for boxes and cylinders" if suite == "libero_object" else ""
    return f"On the env workers: {program}, or options: {{assets: FOLDER}} for a copy of yours{own}"


# -- primitive assets ------------------------------------------------------------------------------------------------

PRIMITIVES: dict[str, tuple[str, tuple[float, ...]]] = {
    "alphabet_soup": ("cylinder", (0.033, 0.04)), "tomato_sauce": ("cylinder", (0.033, 0.04)),
    "bbq_sauce": ("cylinder", (0.025, 0.07)), "ketchup": ("cylinder", (0.025, 0.07)),
    "salad_dressing": ("cylinder", (0.025, 0.07)), "milk": ("box", (0.03, 0.03, 0.08)),
    "orange_juice": ("box", (0.03, 0.03, 0.08)), "cream_cheese": ("box", (0.04, 0.02, 0.02)),
    "butter": ("box", (0.04, 0.02, 0.02)), "chocolate_pudding": ("box", (0.04, 0.03, 0.015)),
}  # fmt: skip
"""Shapes of the objects of libero_object: half sizes of a box, or radius and half height of a cylinder, in meters."""
BASKET = 0.075, 0.005
"""Half the width and height of the basket, and half the thickness of its walls, in meters."""
CONTACT = 'solimp="0.998 0.998 0.001" solref="0.001 1" density="100" friction="0.95 0.3 0.1"'
VERSION = 1
"""Version of the primitive assets; each version has its own folder."""
PLAIN = (200, 200, 200)
"""Color of floors and walls."""


def build_primitives(parent: Path) -> Path:
    """Write the primitive assets (models of boxes and cylinders that replace the library's meshes), unless this user
    has them on this machine. Return their folder ``assets``.

    Raises:
        ValueError: the folder belongs to another user.
    """
    root = parent / f"penstock-libero-primitives-{VERSION}-{os.getuid()}"
    if not root.exists():
        building = Path(tempfile.mkdtemp(dir=parent))
        _write_primitives(building / "assets")
        with contextlib.suppress(OSError):  # another process created it first
            building.rename(root)
        shutil.rmtree(building, ignore_errors=True)
    if root.stat().st_uid != os.getuid():
        raise ValueError(f"{root} belongs to another user; remove it")
    return root / "assets"


def _write_primitives(assets: Path) -> None:
    styles = importlib.import_module("libero.libero.envs.arenas.style").STYLE_MAPPING
    for folder in ("scenes", "textures"):
        (assets / folder).mkdir(parents=True)
    for name, (kind, size) in PRIMITIVES.items():
        _write_object(assets / "stable_hope_objects" / name, _object(name, kind, size))
    _write_object(assets / "stable_scanned_objects" / "basket", _basket())
    (assets / "scenes" / "libero_floor_base_style.xml").write_text(FLOOR)
    for style in styles.values():
        for picture in style.values():
            (assets / "textures" / picture).write_bytes(_png(PLAIN))


def _write_object(folder: Path, model: str) -> None:
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.xml").write_text(model)


def _object(name: str, kind: str, size: tuple[float, ...]) -> str:
    red, green, blue = (byte / 255 for byte in hashlib.blake2b(name.encode(), digest_size=3).digest())
    body = _geom(kind, "0 0 0", size, f"{red:.2f} {green:.2f} {blue:.2f}")
    return _model(name, body, height=size[-1], radius=size[0])


def _basket() -> str:
    wide, thin = BASKET
    walls = [(f"{x} 0 {wide}", (thin, wide, wide)) for x in (-wide, wide)]
    walls += [(f"0 {y} {wide}", (wide, thin, wide)) for y in (-wide, wide)]
    walls.append((f"0 0 {thin}", (wide, wide, thin)))
    inside = (
        f'<site type="box" name="contain_region" pos="0 0 {wide}" quat="1 0 0 0" size="{wide} {wide} {wide}" group="0" '
        'rgba="0.8 0 0 0"/>'
    )
    return _model(
        "basket", inside + "".join(_geom("box", *wall, "0.6 0.4 0.2") for wall in walls), height=0.06, radius=0.05
    )


def _geom(kind: str, place: str, size: tuple[float, ...], colour: str) -> str:
    """Return a collision geom and a visual geom of one shape; the library expects them to be separate."""
    both = f'<geom type="{kind}" pos="{place}" size="{" ".join(map(str, size))}"'
    return (
        f'{both} {CONTACT} group="0" rgba="{colour} 0"/>'
        f'{both} contype="0" conaffinity="0" group="1" rgba="{colour} 1"/>'
    )


def _model(name: str, body: str, *, height: float, radius: float) -> str:
    """Return the MJCF of a robosuite object, whose sites define its size."""
    places = {
        "bottom_site": f"0 0 {-height}", "top_site": f"0 0 {height}", "horizontal_radius_site": f"{radius} {radius} 0",
    }  # fmt: skip
    sites = "".join(f'<site rgba="0 0 0 0" size="0.005" pos="{at}" name="{site}"/>' for site, at in places.items())
    inner = f'<body><body name="object">{body}</body>{sites}</body>'
    return f'<mujoco model="{name}"><worldbody>{inner}</worldbody></mujoco>\n'


FLOOR = """<mujoco model="primitive_floor">
  <asset>
    <texture name="sky" type="skybox" builtin="flat" width="16" height="16" rgb1=".7 .8 .9" rgb2=".7 .8 .9"/>
    <texture name="texplane" type="2d" file="../textures/light-gray-floor-tile.png"/>
    <material name="floorplane" texture="texplane" texrepeat="4 4"/>
    <texture name="tex-wall" type="2d" file="../textures/light-gray-plaster.png"/>
    <material name="walls_mat" texture="tex-wall" texrepeat="4 4"/>
  </asset>
  <worldbody>
    <body name="floor">
      <geom name="floor" type="plane" size="4 4 .1" condim="3" group="1" material="floorplane"/>
    </body>
    <geom name="back_wall" type="box" pos="-2.5 0 1" size="0.02 2.5 1" contype="0" conaffinity="0" group="1"
          material="walls_mat"/>
    <light name="lamp" pos="0.5 0.5 3" dir="0 0 -1" diffuse=".7 .7 .7" castshadow="false"/>
    <camera name="agentview" mode="fixed" pos="1.0 0 1.0" quat="0.632 0.316 0.316 0.632"/>
    <camera name="frontview" mode="fixed" pos="1.5 0 1.2" quat="0.612 0.354 0.354 0.612"/>
    <camera name="sideview" mode="fixed" pos="0 1.5 1.0" quat="0.000 0.000 0.501 0.866"/>
    <camera name="birdview" mode="fixed" pos="0 0 2.5" quat="0.707 0.000 0.000 0.707"/>
  </worldbody>
</mujoco>
"""


def _png(colour: tuple[int, int, int], side: int = 8) -> bytes:
    """Return a PNG image of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(colour) * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
