"""``penstock sims``: installs simulators, and trains world models.

Each simulator gets its own environment, because the libraries of different simulators conflict.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.exits import FAILED
from penstock.cli.printing import Json, console, note, show_json, table
from penstock.local.world_model import Fitting, fit, write_world_model
from penstock.services.env.simulators import (
    ADAPTER,
    BACKENDS,
    INSTALLED,
    LIBRARIES,
    NAME,
    how_to_get_library,
    interpreter_of,
)
from penstock.shared.config.service import ServiceSettings, load_settings
from penstock.shared.data.demonstrations import read_demonstrations
from penstock.shared.errors import ConfigError

__all__ = ["Pins", "app", "ensure_simulator", "find_simulators", "how_to_install"]

app = typer.Typer(
    name="sims",
    help="Simulators of embodied jobs: install them, and see which are here.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


models = typer.Typer(
    name="world-model",
    help="World models: train one from recorded episodes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(models)


@dataclass(frozen=True)
class Pins:
    """Python packages that a simulator requires.

    Attributes:
        packages: pinned requirements for pip.
        imports: Python code to put after ``import``; the whole statement succeeds only if the simulator works.
        note: hint about requirements that pip cannot install.
        libraries: shared libraries of the system without which the simulator does not start.
    """

    packages: tuple[str, ...]
    imports: str
    note: str = ""
    libraries: tuple[str, ...] = ()


ENCODER = "imageio-ffmpeg==0.8.1"
"""Package that encodes films (BSD-2-Clause). It contains the program ffmpeg (GPL), which runs as its own process."""
PACKAGING = "packaging==26.3"
"""Package that the MuJoCo environments of Gymnasium import without declaring it as a dependency."""
OPENCV = ("libGL.so.1", "libgthread-2.0.so.0")
"""Shared libraries that OpenCV loads."""
PICTURES = "pictures and videos need OSMesa: apt-get install -y libosmesa6"
PINS = {
    "gymnasium": Pins(
        ("gymnasium[classic-control,mujoco]==1.4.0", "mujoco==3.3.0", PACKAGING, ENCODER),
        "gymnasium.envs.mujoco",
        PICTURES,
    ),
    "libero": Pins(
        ("rlinf-libero==0.1.3", "robosuite==1.4.1", "bddl==3.6.0", "mujoco==3.3.0", "numpy==1.26.4", ENCODER),
        "bddl, mujoco, libero",
        f"meshes come by libero-download-assets in its bin folder; {PICTURES}",
        OPENCV,
    ),
    "maniskill": Pins(
        ("torch==2.13.0", "mani_skill==3.0.1", "sapien==3.0.3", "gymnasium==1.4.0", "numpy==1.26.4", ENCODER),
        "sapien, importlib.metadata; importlib.metadata.version('mani_skill')",  # importing mani_skill takes seconds
        "videos need Vulkan: a GPU's driver, or apt-get install -y libvulkan1 mesa-vulkan-drivers (Mesa 25 or newer)",
        ("libX11.so.6", *OPENCV),
    ),
    "metaworld": Pins(
        ("metaworld==3.1.1", "gymnasium==1.4.0", "mujoco==3.3.0", PACKAGING, ENCODER),
        "metaworld",
        PICTURES,
    ),
}
"""Requirements by backend. Backends that are not listed run in the env service's interpreter."""

IMPORT_LIMIT_S = 120.0
FITTING = Fitting()
SAID_EVERY = 20
"""Epochs between two progress lines of a world model's training."""


@app.command()
def install(
    name: Annotated[
        str, typer.Argument(help="Simulator: gymnasium, libero, maniskill, metaworld, or a name for --adapter.")
    ],
    *,
    python: Annotated[Path, typer.Option(help="Python interpreter of the new environment.")] = Path(sys.executable),
    again: Annotated[bool, typer.Option("--again", help="Remove the installation and install again.")] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="An adapter file of your own, for a simulator of your own.")
    ] = None,
    package: Annotated[list[str] | None, typer.Option(help="With --adapter: a required package; repeatable.")] = None,
    index: Annotated[str | None, typer.Option(help="A further package index, for pip --extra-index-url.")] = None,
    as_json: Json = False,
) -> None:
    """Install a simulator, with pinned packages, in its own environment in PENSTOCK_SIMS_DIR."""
    pins = PINS.get(name) if adapter is None else _pins_of_own(name, adapter, package or [])
    if pins is None:
        raise ConfigError(f"no simulator '{name}'; there is: {', '.join(sorted(PINS))}")
    folder = load_settings().sims_dir.expanduser() / name
    if (folder / INSTALLED).exists() and not again:
        note(f"{name} is installed in {folder}; --again installs it anew")
    else:
        _install(name, pins, folder, python, adapter=adapter, index=index)
    if as_json:
        show_json({"name": name, "folder": str(folder), "packages": pins.packages})


def _pins_of_own(name: str, adapter: Path, packages: list[str]) -> Pins:
    """Return the packages that a user's own simulator adapter requires. Raises ConfigError if its name or file is
    invalid."""
    if name in BACKENDS or not NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot name a simulator of your own: use small letters, digits, _ and -, and no taken name"
        )
    if not adapter.is_file():
        raise ConfigError(f"there is no file {adapter}")
    return Pins(("numpy>=1.26", ENCODER, *packages), "numpy")


def ensure_simulator(name: str) -> None:
    """Install a simulator, unless it works on this machine already.

    Raises:
        typer.Exit: the installation failed; the output has the reason.
    """
    settings = load_settings()
    problem = next((problem for found, _, problem in find_simulators(settings) if found == name), "")
    if problem and name in PINS:
        note(f"{name} is not here yet ({problem.partition(':')[0]}): installing it once")
        _install(name, PINS[name], settings.sims_dir.expanduser() / name, Path(sys.executable))


def _install(
    name: str, pins: Pins, folder: Path, python: Path, *, adapter: Path | None = None, index: str | None = None
) -> None:
    started = time.monotonic()
    _check_libraries(name, pins, python)
    if folder.exists():
        shutil.rmtree(folder)
    _run([str(python), "-m", "venv", str(folder)], f"making an environment in {folder}")
    own = folder / "bin" / "python"
    further = ["--extra-index-url", index] if index else []
    pip = [str(own), "-m", "pip", "install", "--progress-bar", "off", *further]
    _run([*pip, *pins.packages], f"installing {name}")
    if adapter is not None:
        shutil.copyfile(adapter, folder / ADAPTER)
    _run(_trial(name, str(own), folder), f"importing {name}")
    (folder / INSTALLED).write_text(json.dumps({"packages": pins.packages}))
    note(f"{name} is ready after {time.monotonic() - started:.0f} s{': ' + pins.note if pins.note else ''}")


def _check_libraries(name: str, pins: Pins, python: Path) -> None:
    """Check that the system libraries of a simulator can be loaded, before its packages (gigabytes) are installed.

    Raises:
        ConfigError: some are missing; the message has the command that installs them.
    """
    commands = {one: [str(python), "-c", _load(one)] for one in pins.libraries}
    missing = [one for one in commands if subprocess.run(commands[one], capture_output=True, check=False).returncode]
    if missing:
        packages = " ".join(LIBRARIES[one] for one in missing)
        raise ConfigError(f"{name} needs {', '.join(missing)}: run `apt-get install -y {packages}`, then this command")


def _load(*libraries: str) -> str:
    """Return Python code that loads shared libraries."""
    return f"import ctypes; [ctypes.CDLL(one) for one in {libraries!r}]"


def _trial(name: str, python: str, folder: Path) -> list[str]:
    """Return a command that tries out a simulator; its exit status is 0 only if the simulator works."""
    if name not in BACKENDS:
        return [python, "-P", str(folder / ADAPTER)]
    pins = PINS.get(name, Pins((), "numpy"))
    return [python, "-c", f"import {pins.imports}; {_load(*pins.libraries)}"]


@app.command(name="ls")
def list_simulators(*, as_json: Json = False) -> None:
    """List the simulators, and the Python interpreter of each."""
    rows = list(find_simulators(load_settings()))
    if as_json:
        show_json([{"name": name, "python": python, "problem": problem} for name, python, problem in rows])
        return
    shown = [(name, "missing" if problem else "ready", problem or python) for name, python, problem in rows]
    console().print(table(("SIMULATOR", "", "INTERPRETER"), shown))


@models.command()
def train(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of episodes that `penstock record` wrote.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder of the model: options.model of a job.")],
    members: Annotated[int, typer.Option(min=1, max=32, help="Networks in the ensemble.")] = FITTING.members,
    hidden: Annotated[list[int] | None, typer.Option(min=1, help="Width of a hidden layer; repeatable.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the episodes.")] = FITTING.epochs,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, samples and held-out episodes.")] = FITTING.seed,
    as_json: Json = False,
) -> None:
    """Train a model of a simulator on recorded episodes, for jobs with the backend world_model."""
    fitting = Fitting(members=members, hidden_sizes=tuple(hidden or FITTING.hidden_sizes), epochs=epochs, seed=seed)

    def report(epoch: int, loss: float) -> None:
        if epoch % SAID_EVERY == 0 or epoch == epochs:
            note(f"{epoch} of {epochs} epochs, loss {loss:.4f}")

    fitted = fit(read_demonstrations(file), fitting, on_epoch=report)
    write_world_model(out, fitted)
    facts = fitted.facts
    if as_json:
        show_json({"path": str(out), **facts})
        return
    error = facts["error"]
    note(
        f"{out}: '{facts['task']}' of {facts['backend']} from {facts['episodes']} episodes, "
        f"{facts['transitions']} steps; on held-out episodes the error of one step is {error['state']:.3f} of the "
        f"deviation for observations and {error['reward']:.3f} for rewards; {error['ends']:.2%} of ends are wrong"
    )


def find_simulators(settings: ServiceSettings) -> Iterator[tuple[str, str, str]]:
    """Yield ``(name, interpreter, problem)`` for each simulator; ``problem`` is '' if the simulator works."""
    folder = settings.sims_dir.expanduser()
    own = {file.parent.name for file in folder.glob(f"*/{ADAPTER}")}
    for name in sorted(BACKENDS | dict.fromkeys(own)):
        python = interpreter_of(name, folder)
        try:
            result = subprocess.run(
                _trial(name, python, folder / name), capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            yield name, python, f"{python} does not run: {error}"
            continue
        last = (result.stderr.strip().splitlines() or [""])[-1]
        yield name, python, f"{last}: {how_to_get_library(last) or how_to_install(name)}" if result.returncode else ""


def how_to_install(name: str, *, again: bool = False) -> str:
    """Return the command that installs a simulator."""
    own = "" if name in BACKENDS else " --adapter FILE"
    return f"penstock sims install {name}{own}{' --again' if again else ''}"


def _run(command: list[str], what: str) -> None:
    """Run one installation step and print the relevant lines of its output. Raises typer.Exit if it fails."""
    note(f"{what} ...")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("Collecting", "Installing", "Successfully", "ERROR", "  ")) or "rror" in line:
                note(f"  {line.rstrip()[:160]}")
    if process.returncode:
        note(f"{what} failed with exit status {process.returncode}")
        raise typer.Exit(FAILED)
