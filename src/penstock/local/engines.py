"""Installs and checks separate interpreters for rollout engines whose libraries conflict with Penstock's.

One file for each environment, in LOCKS, pins all packages of an engine, dependencies included. So pip resolves nothing:
a resolver would add unwanted packages (CUDA builds of torchvision on a machine without a GPU).
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from penstock.services import rollout
from penstock.shared.config.rollout import ENGINE_PACKAGES, ENVIRONMENT_OF, ENVIRONMENTS
from penstock.shared.errors import ConfigError, DeadlineError, Unavailable

__all__ = ["engine_problem", "engine_python", "environment_of", "install_engine"]

LOCKS = Path(rollout.__file__).parent / "engines" / "requirements"
IMPORT_LIMIT_S = 180.0
INSTALL_LIMIT_S = 3600.0
_LARGE = 2
"""Number of large packages, which a package file lists first. Each is installed in its own step, for cheap retries."""

Report = Callable[[str], None]


class _Installation(msgspec.Struct):
    """State of an engine's environment, stored inside the environment."""

    pins: str
    """Digest of the pinned packages."""
    begun: int = -1
    done: int = -1
    """Numbers of the newest step that was begun, and of the newest that was completed."""
    complete: bool = False


def environment_of(engine: str) -> str:
    """Return the name of the environment that contains ``engine``. Raises ConfigError: no such engine."""
    if engine not in ENVIRONMENT_OF:
        known = ", ".join(ENVIRONMENT_OF)
        raise ConfigError(f"no engine '{engine}' has an environment of its own; there is: {known}")
    return ENVIRONMENT_OF[engine]


def engine_python(name: str, engines_dir: Path) -> Path:
    """Return the path of the Python interpreter in the engine environment ``name``.

    Raises:
        ConfigError: the environment is missing or incomplete, or has other versions than this Penstock pins.
    """
    folder = engines_dir.expanduser() / name
    installed, problem = _read(folder), ""
    if installed is None:
        problem = f"{folder} has no environment of it"
    elif not installed.complete:
        problem = f"its installation in {folder} was interrupted"
    elif installed.pins != _digest(_pins(name)):
        problem = f"{folder} has other versions than this Penstock needs"
    if problem:
        raise ConfigError(f"engine '{name}': {problem}; run: penstock engines install {name}")
    return _python(folder)


def engine_problem(name: str, engines_dir: Path) -> str:
    """Return the reason why an engine's environment does not work, or ''. Takes some seconds, because it imports the
    engine."""
    try:
        python = engine_python(name, engines_dir)
        _check(python, name)
    except (ConfigError, Unavailable) as error:
        return str(error)
    return ""


def install_engine(name: str, engines_dir: Path, *, base: Path, report: Report, again: bool = False) -> Path:
    """Install an engine's environment, or complete an interrupted installation. Do nothing if the environment is
    complete. Blocks.

    Args:
        base: interpreter from which the environment is created.
        report: receives messages about the progress.
        again: remove an existing environment first.

    Returns:
        The interpreter.

    Raises:
        Unavailable: a step failed; ``report`` received pip's errors. The next call continues from that step.
        DeadlineError: another process has installed the environment for INSTALL_LIMIT_S seconds.
    """
    pins, folder = _pins(name), engines_dir.expanduser() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder, report):
        installed = _read(folder)
        if again or installed is None or installed.pins != _digest(pins) or not _runs(_python(folder)):
            shutil.rmtree(folder, ignore_errors=True)
            installed = None
        if installed is not None and installed.complete:
            return _python(folder)
        began = time.monotonic()
        if installed is None:
            _run([str(base), "-m", "venv", str(folder)], f"making an environment in {folder}", report)
            installed = _Installation(_digest(pins))
            _write(folder, installed)
        _install(folder, installed, _steps(pins), report)
        report(f"importing {name} ...")
        _check(_python(folder), name)
        installed.complete = True
        _write(folder, installed)
        report(f"{name} is ready after {time.monotonic() - began:.0f} s: {_python(folder)}")
    return _python(folder)


def _install(folder: Path, installed: _Installation, steps: list[list[str]], report: Report) -> None:
    pip = [str(_python(folder)), "-m", "pip", "--no-input", "install", "--no-deps", "--progress-bar", "off"]
    for number, packages in enumerate(steps):
        if number <= installed.done:
            continue
        torn = (
            ["--force-reinstall"] if installed.begun == number else []
        )  # an interrupted step may leave half-written files
        installed.begun = number
        _write(folder, installed)
        what = packages[0] if len(packages) == 1 else f"{len(packages)} libraries"
        _run([*pip, *torn, *packages], f"step {number + 1} of {len(steps)}: {what}", report)
        installed.done = number
        _write(folder, installed)


def _steps(pins: list[str]) -> list[list[str]]:
    rest = pins[_LARGE:]
    return [*([pin] for pin in pins[:_LARGE]), *([rest] if rest else [])]


def _pins(name: str) -> list[str]:
    assert name in ENVIRONMENTS, name
    lines = (LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


def _digest(pins: list[str]) -> str:
    return hashlib.sha256("\n".join(pins).encode()).hexdigest()[:16]


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _read(folder: Path) -> _Installation | None:
    try:
        return msgspec.json.decode((folder / "penstock.json").read_bytes(), type=_Installation)
    except (OSError, msgspec.DecodeError):
        return None


def _write(folder: Path, installed: _Installation) -> None:
    path = folder / "penstock.json"
    path.with_suffix(".new").write_bytes(msgspec.json.encode(installed))
    path.with_suffix(".new").replace(path)


def _runs(python: Path) -> bool:
    try:
        return not subprocess.run([str(python), "-c", ""], capture_output=True, timeout=60, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _check(python: Path, name: str) -> None:
    """Raise Unavailable if ``python`` cannot import the engine ``name`` and the other libraries that it needs there."""
    beside = "nats, xxhash, msgspec" if name in ENGINE_PACKAGES else "torch"  # with a worker in it, or only a server
    command = [str(python), "-c", f"import {name}, transformers, {beside}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(
            f"engine '{name}': {python} does not run: {error}; run: penstock engines install {name} --again"
        ) from None
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it does not import"])[-1]
        raise Unavailable(f"engine '{name}': {last}; run: penstock engines install {name} --again")


@contextmanager
def _alone(folder: Path, report: Report) -> Iterator[None]:
    """Hold a lock so that one process at a time installs; the kernel releases it when the holder ends."""
    with folder.with_suffix(".lock").open("w") as lock:
        end, waits = time.monotonic() + INSTALL_LIMIT_S, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    report(f"another process installs into {folder}; waiting for it")
                waits = True
            if time.monotonic() > end:
                raise DeadlineError(f"another process has installed into {folder} for {INSTALL_LIMIT_S:g} s; stop it")
            time.sleep(0.2)
        yield


def _run(command: list[str], what: str, report: Report) -> None:
    """Run one step and report its output line by line. Raises Unavailable if it fails."""
    report(f"{what} ...")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("Collecting", "Installing", "Successfully", "ERROR")) or "rror:" in line:
                report(f"  {line.rstrip()[:160]}")
    if process.returncode:
        raise Unavailable(f"{what} failed with exit status {process.returncode}; the same command goes on from here")
