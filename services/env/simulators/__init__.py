"""Simulator backends. Each backend is one adapter file in ``backends``, which ``child.py`` runs in a separate process.

The env service calls this package. It may import messages of the protocol and errors, but no simulator: simulators are
installed in the interpreter of the child process. To add a backend, add one file and one line in ``BACKENDS``; the
contract test then covers it. ``penstock sims install NAME --adapter FILE`` stores a user's adapter in
``PENSTOCK_SIMS_DIR``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.services.env.simulators.base import Chunk, Named, Simulator, Started, Stepping, Stored
from penstock.services.env.simulators.process import ProcessSimulator
from penstock.shared.errors import ConfigError, PenstockError
from penstock.shared.protocol.embodied.environment import EnvSpec, OpenEnv

__all__ = [
    "ADAPTER",
    "BACKENDS",
    "INSTALLED",
    "NAME",
    "WORLD_MODEL",
    "Chunk",
    "Named",
    "Simulator",
    "Started",
    "Stepping",
    "Stored",
    "adapter_of",
    "describe_simulator",
    "how_to_get_library",
    "interpreter_of",
    "open_simulator",
]

WORLD_MODEL = "world_model"
FOLDER = Path(__file__).with_name("backends")
BACKENDS = {
    "gymnasium": FOLDER / "gymnasium_backend.py",
    "libero": FOLDER / "libero_backend.py",
    "maniskill": FOLDER / "maniskill_backend.py",
    "metaworld": FOLDER / "metaworld_backend.py",
    WORLD_MODEL: FOLDER / "world_model_backend.py",
}
PACKAGES = {
    "gymnasium": frozenset({"gymnasium", "mujoco", "pygame", "numpy"}),
    "libero": frozenset({"libero", "robosuite", "bddl", "mujoco", "gymnasium", "torch", "numpy"}),
    "maniskill": frozenset({"mani_skill", "sapien", "gymnasium", "torch", "numpy"}),
    "metaworld": frozenset({"metaworld", "gymnasium", "mujoco", "numpy"}),
}
"""Modules that ``penstock sims install`` installs for a backend."""
LIBRARIES = {"libGL.so.1": "libgl1", "libX11.so.6": "libx11-6", "libgthread-2.0.so.0": "libglib2.0-0"}
"""Shared libraries that modules of simulators load and pip does not install, and the Debian package of each."""
NOT_HERE = {
    "behavior": "BEHAVIOR-1K: Isaac Sim, OmniGibson, NVIDIA GPUs with ray tracing, and data that has its own licence",
    "calvin": "CALVIN: calvin_env with PyBullet, EGL, and its data set",
    "genesis": "Genesis: genesis-world, in an interpreter of its own because it needs another MuJoCo",
    "isaac": "Isaac Lab: isaaclab with Isaac Sim, and NVIDIA GPUs with ray tracing",
    "robotwin": "RoboTwin: its repository, SAPIEN with a GPU that renders, and its asset pack",
}
"""Known simulators without an adapter in Penstock, and the packages that an adapter would need."""
NAME = re.compile(r"[a-z][a-z0-9_-]*")
"""Valid name of a simulator, which is also the name of its folder."""
ADAPTER = "adapter.py"
"""File name of a user's adapter, in the folder of its interpreter."""
INSTALLED = "installed.json"
"""File that ``penstock sims install`` writes into an interpreter's folder once the installation is complete."""
MAX_ENVS = 4096
"""Maximum number of environments of one session."""


def interpreter_of(backend: str, sims_dir: Path) -> str:
    """Return the Python interpreter of a backend: the one that ``penstock sims install`` created, else the env
    service's own."""
    own = sims_dir / backend
    return str(own / "bin" / "python") if (own / INSTALLED).exists() else sys.executable


def adapter_of(backend: str, sims_dir: Path) -> Path:
    """Return the path of a simulator's adapter.

    Raises:
        ConfigError: no backend or installed adapter has this name.
    """
    own = sims_dir / backend / ADAPTER
    if backend in BACKENDS:
        return BACKENDS[backend]
    if NAME.fullmatch(backend) and own.is_file():
        return own
    installed = {one.parent.name for one in sims_dir.glob(f"*/{ADAPTER}")}
    needs = f". {NOT_HERE[backend]}" if backend in NOT_HERE else ""
    raise ConfigError(
        f"no simulator backend '{backend}'; there is: {', '.join(sorted(BACKENDS | dict.fromkeys(installed)))}{needs}. "
        "An adapter of your own: penstock sims install NAME --adapter FILE"
    )


def open_simulator(request: OpenEnv, sims_dir: Path) -> Simulator:
    """Create the environments of a session. Blocking.

    Raises:
        ConfigError: the backend or environment does not exist, or cannot be created on this host.
    """
    if not 1 <= request.num_envs <= MAX_ENVS:
        raise ConfigError(f"num_envs {request.num_envs}: a session holds 1 to {MAX_ENVS} environments")
    adapter = adapter_of(request.backend, sims_dir)
    python = interpreter_of(request.backend, sims_dir)
    try:
        return ProcessSimulator(request, python=python, backend=adapter, limit_s=request.step_limit_s)
    except ConfigError as error:
        hint = _hint(str(error), request.backend, python)
        raise ConfigError(f"'{request.env_id}' of {request.backend}: {error}{hint}") from None


def _hint(error: str, backend: str, python: str) -> str:
    """Return advice on how to install a module or library that ``error`` says is missing, or '' for any other error."""
    missing = re.search(r"ModuleNotFoundError: (?:No module named '|import of )([\w.]+)", error)
    if missing is None:
        library = how_to_get_library(error)
        return f": {library}" if library else ""
    if missing[1].partition(".")[0] in PACKAGES.get(backend, ()):
        return f": run `penstock sims install {backend}`"
    return f": install what has '{missing[1]}' into the interpreter of the simulator, {python}"


def how_to_get_library(error: str) -> str:
    """Return advice on how to install a shared library that ``error`` says is missing, or '' for any other error."""
    missing = re.search(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object file", error)
    if missing is None:
        return ""
    if missing[1] in LIBRARIES:
        return f"run `apt-get install -y {LIBRARIES[missing[1]]}` on the host of the simulator"
    return f"install the system package that has {missing[1]} on the host of the simulator"


def describe_simulator(request: OpenEnv, sims_dir: Path) -> EnvSpec:
    """Return the spec of a request's environments after a trial: create them, step an episode once, and close them.

    Blocking.

    With ``camera``, also film the start of an episode. If that fails, ``no_video`` of the result has the reason.

    Raises:
        ConfigError: the environments cannot be created, the episode does not begin, or its first step fails.
    """
    spec, reason = _try_out(msgspec.structs.replace(request, camera=False), sims_dir)
    if reason:
        raise ConfigError(f"'{request.env_id}' of {request.backend}: {reason}")
    if not request.camera:
        return spec
    try:
        _, reason = _try_out(request, sims_dir)
    except ConfigError as error:
        reason = str(error)
    return msgspec.structs.replace(spec, no_video=reason)


def _still(spec: EnvSpec) -> NDArray[Any]:
    """Return a chunk of one action, [1, 1, ...]: zeros, or the nearest values within the bounds."""
    action = np.zeros(spec.action_shape, np.float64)
    if spec.num_actions is None:
        low, high = (np.reshape(bound, spec.action_shape) for bound in (spec.action_low, spec.action_high))
        action = np.clip(action, low, high)
    return action.astype(spec.action_dtype)[None, None]


def _try_out(request: OpenEnv, sims_dir: Path) -> tuple[EnvSpec, str]:
    """Begin an episode, and step it once (or film it, with ``camera``); return ``(spec, reason of a failure or
    '')``."""
    simulator = open_simulator(request, sims_dir)
    spec, first = simulator.spec, np.zeros(1, np.int32)
    try:
        begun = simulator.reset(first, np.zeros(1, np.int64))
        if 0 in begun.lost:
            reason = f"no episode begins: {begun.lost[0]}"
        elif request.camera:
            _, reason = simulator.film(0)
        else:
            lost = simulator.step(first, _still(spec), None).lost
            reason = f"the first step of an episode fails: {lost[0]}" if lost else ""
            spec = simulator.described()
    except PenstockError as error:
        reason = str(error)
    finally:
        simulator.close()
    return spec, reason
