"""``penstock doctor``: checks of this machine's prerequisites for a deployment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from penstock.cli.deployment.machine import DEMO_STREAMS
from penstock.cli.deployment.sims import find_simulators, how_to_install
from penstock.cli.exits import FAILED, OK
from penstock.cli.printing import Json, console, note, show_json, table
from penstock.client import Client
from penstock.local import LARGEST, StreamSizes, plan_room, read_state
from penstock.local.engines import engine_problem
from penstock.local.ports import claimable
from penstock.services.env.simulators import INSTALLED, how_to_get_library
from penstock.shared.config.rollout import ENVIRONMENTS
from penstock.shared.config.service import ServiceSettings, load_settings
from penstock.shared.errors import ConfigError, DeadlineError, PenstockError, Unavailable
from penstock.shared.transport.server import NatsServer, ValkeyServer

__all__ = ["Finding", "doctor"]

_MIB = 1 << 20
_NEED_SHM, _NEED_FILES = 256 * _MIB, 512 * _MIB
"""Free bytes needed in shared memory for weights and bulk data, and in the data directory for checkpoints and logs."""


@dataclass(frozen=True)
class Finding:
    """Outcome of one check; ``fix`` is the remedy if ``state`` is not ok."""

    name: str
    state: Literal["ok", "warning", "failed"]
    detail: str
    fix: str = ""


def doctor(as_json: Json = False) -> None:
    """Check this machine and suggest fixes; exit 1 if something needed is missing."""
    settings = load_settings()
    findings = []
    for check in (_python, _torch, _nats, _valkey, _shm, _disk, _streams, _simulators, _engines, _port, _api):
        if not as_json:
            note(f"checking {check.__name__.strip('_')} ...")
        findings += list(check(settings))
    if as_json:
        show_json([asdict(finding) for finding in findings])
    else:
        rows = [(f.state, f.name, f.detail, f.fix) for f in findings]
        console().print(table(("", "CHECK", "FOUND", "FIX"), rows))
    raise typer.Exit(FAILED if any(f.state == "failed" for f in findings) else OK)


def _python(_: ServiceSettings) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 11):  # noqa: UP036 (a wheel can be forced into an older one)
        yield Finding("python", "ok", version)
    else:
        yield Finding("python", "failed", version, "use Python 3.11 or newer")


def _torch(_: ServiceSettings) -> Iterator[Finding]:
    code = (
        "import torch, transformers; c = torch.cuda; "
        "print(torch.__version__, 'transformers', transformers.__version__, "
        "f'{c.device_count()} GPU' if c.is_available() else f'CPU, {torch.get_num_threads()} threads')"
    )
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("torch", "failed", "importing it took longer than 120 s", "free some memory, or reinstall torch")
        return
    if result.returncode == 0:
        yield Finding("torch", "ok", result.stdout.strip())
    else:
        last = (result.stderr.strip().splitlines() or ["it does not import"])[-1]
        yield Finding("torch", "failed", last, "pip install 'penstock[demo]'")


def _nats(_: ServiceSettings) -> Iterator[Finding]:
    yield _starts("nats-server", NatsServer, "needed unless PENSTOCK_NATS_URL names one")


def _valkey(_: ServiceSettings) -> Iterator[Finding]:
    finding = _starts("valkey", ValkeyServer, "optional")
    state = "warning" if finding.state == "failed" else finding.state
    yield Finding(finding.name, state, finding.detail, finding.fix)


def _starts(name: str, make: Callable[[Path], NatsServer | ValkeyServer], why: str) -> Finding:
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as folder:
        try:
            with make(Path(folder) / name) as server:
                return Finding(name, "ok", f"starts and listens ({server.url})")
        except (ConfigError, DeadlineError) as error:
            return Finding(name, "failed", str(error), f"pip install 'penstock[embedded]' ({why})")


def _shm(settings: ServiceSettings) -> Iterator[Finding]:
    yield _space("shared memory", settings.shm_dir, _NEED_SHM, "mount a larger tmpfs (docker: --shm-size=1g)")


def _disk(settings: ServiceSettings) -> Iterator[Finding]:
    folder = settings.data_dir
    while not folder.exists():
        folder = folder.parent
    yield _space("data directory", folder, _NEED_FILES, "free some space, or set PENSTOCK_DATA_DIR")


def _simulators(settings: ServiceSettings) -> Iterator[Finding]:
    """Check the optional simulators: warn only about a simulator that is installed and does not work."""
    found = list(find_simulators(settings))
    missing = {name: problem for name, _, problem in found if problem}
    broken = [name for name in missing if (settings.sims_dir.expanduser() / name / INSTALLED).exists()]
    ready = ", ".join(name for name, _, problem in found if not problem) or "none"
    detail = f"{ready}; not here: {', '.join(missing)}" if missing else ready
    fix = how_to_get_library(missing[broken[0]]) or how_to_install(broken[0], again=True) if broken else ""
    yield Finding("simulators", "warning" if broken else "ok", detail, fix)


def _engines(settings: ServiceSettings) -> Iterator[Finding]:
    """Check the optional engines: warn only about an engine that is installed, at least in part, and does not work."""
    for name in ENVIRONMENTS:
        if not (settings.engines_dir.expanduser() / name).exists():
            yield Finding(f"engine {name}", "ok", f"not here; penstock engines install {name} brings it")
            continue
        problem = engine_problem(name, settings.engines_dir)
        said, _, fix = problem.partition("; run: ")
        yield Finding(f"engine {name}", "warning" if problem else "ok", said or "installed, and imports", fix)


def _streams(settings: ServiceSettings) -> Iterator[Finding]:
    """Check the disk space for the streams of ``penstock demo``, and of ``penstock up`` without an external bus."""
    if "PENSTOCK_NATS_URL" not in os.environ:
        store = NatsServer(settings.data_dir.expanduser().resolve() / "nats").store
        yield _room("streams", store, LARGEST, "failed", "free some space, or set PENSTOCK_DATA_DIR")
    folder = Path(tempfile.gettempdir())
    yield _room(
        "streams of a demo", folder / "penstock-demo", DEMO_STREAMS, "warning", "penstock demo --data-dir FOLDER"
    )


def _room(name: str, store: Path, largest: StreamSizes, short: Literal["warning", "failed"], fix: str) -> Finding:
    try:
        room = plan_room(store, {}, largest=largest)
    except ConfigError as error:
        return Finding(name, short, str(error), fix)
    return Finding(name, "ok" if room.fits else "warning", room.summary, "" if room.fits else fix)


def _space(name: str, folder: Path, need: int, fix: str) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(name, "failed", f"{folder}: {error.strerror}", fix)
    detail = f"{folder}: {free // _MIB:,} MiB free"
    return Finding(name, "ok" if free >= need else "failed", detail, "" if free >= need else fix)


def _port(settings: ServiceSettings) -> Iterator[Finding]:
    running = read_state(settings.data_dir)
    where = f"{settings.http_host}:{settings.http_port}"
    if running is not None:
        yield Finding("port", "ok", f"a deployment runs at {running.url} (process {running.pid})")
        return
    try:
        claimable(settings.http_host, settings.http_port)
    except ConfigError as error:
        yield Finding("port", "warning", str(error), "penstock up --port 0, or PENSTOCK_HTTP_PORT")
    else:
        yield Finding("port", "ok", f"{where} is free")


def _api(_: ServiceSettings) -> Iterator[Finding]:
    with Client(retries=0, timeout_s=5.0) as client:
        try:
            version = client.version()
        except Unavailable:
            yield Finding("coordinator", "warning", f"nothing answers at {client.url}", "penstock up, or PENSTOCK_URL")
        except PenstockError as error:
            yield Finding("coordinator", "failed", str(error), "check PENSTOCK_URL")
        else:
            yield Finding("coordinator", "ok", f"{client.url} runs {version.get('version')}")
