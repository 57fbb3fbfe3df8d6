"""``penstock doctor`` on a machine that lacks something."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.deployment.doctor import _engines
from penstock.local.engines import _digest, _Installation, _pins, _write
from penstock.services.env.simulators import INSTALLED
from penstock.shared.config.service import ServiceSettings


def test_what_is_missing_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / "nats-server").symlink_to(Path(sys.executable).with_name("nats-server"))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30, total=1 << 40))
    for name in ("NATS_URL", "EXPERIENCE_BYTES", "STREAM_BYTES"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        environment = {
            "PENSTOCK_HTTP_PORT": str(port),
            "PENSTOCK_URL": f"http://127.0.0.1:{port}",
            "PENSTOCK_SHM_DIR": str(tmp_path / "nowhere"),
            "PENSTOCK_DATA_DIR": str(tmp_path / "data"),
            "PENSTOCK_ENGINES_DIR": str(tmp_path / "engines"),
        }
        result = CliRunner().invoke(app, ["doctor", "--json"], env=environment)
    assert result.exit_code == 1, result.output
    found = {row["name"]: row for row in json.loads(result.stdout)}
    states = {name: row["state"] for name, row in found.items()}
    assert states == {
        "python": "ok", "torch": "failed", "nats-server": "ok", "valkey": "ok", "shared memory": "failed",
        "data directory": "ok", "streams": "failed", "streams of a demo": "warning", "simulators": "ok",
        "engine vllm": "ok", "engine sglang": "ok", "port": "warning", "coordinator": "warning",
    }  # fmt: skip
    assert found["torch"]["detail"] == "ModuleNotFoundError: No module named 'torch'"
    assert found["torch"]["fix"] == "pip install 'penstock[demo]'"
    assert str(tmp_path / "nowhere") in found["shared memory"]["detail"]
    assert f"port {port} of 127.0.0.1 is not free" in found["port"]["detail"]
    for name in ("streams", "streams of a demo"):
        assert "has 1,024 MiB free, and the streams need 2,048 MiB" in found[name]["detail"]
    assert found["streams of a demo"]["fix"] == "penstock demo --data-dir FOLDER"


@pytest.mark.parametrize(
    ("script", "fix"),
    [
        ("#!/bin/sh\necho 'ImportError: metaworld' >&2\nexit 1\n", "penstock sims install metaworld --again"),
        ("#!/nowhere/python\n", "penstock sims install metaworld --again"),
        (
            "#!/bin/sh\necho 'ImportError: libGL.so.1: cannot open shared object file: No such file' >&2\nexit 1\n",
            "run `apt-get install -y libgl1` on the host of the simulator",
        ),
    ],
)
def test_a_broken_simulator_is_a_warning_with_its_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, fix: str
) -> None:
    """Meta-World is installed, but its interpreter fails or does not run. The other simulators work."""
    works = tmp_path / "python"
    works.write_text("#!/bin/sh\nexit 0\n")
    works.chmod(0o755)
    for name in ("nats-server", "valkey-server"):
        if (program := Path(sys.executable).with_name(name)).exists():
            (tmp_path / name).symlink_to(program)
    monkeypatch.setattr(sys, "executable", str(works))
    broken = tmp_path / "sims" / "metaworld" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text(script)
    broken.chmod(0o755)
    environment = {"PENSTOCK_SIMS_DIR": str(tmp_path / "sims"), "PENSTOCK_DATA_DIR": str(tmp_path / "data")}

    def found() -> dict[str, str]:
        result = CliRunner().invoke(app, ["doctor", "--json"], env=environment)
        row: dict[str, str] = next(row for row in json.loads(result.stdout) if row["name"] == "simulators")
        return row

    assert found()["state"] == "ok", "an installation that did not end counts as none"
    (broken.parents[1] / INSTALLED).write_text("{}")
    row = found()
    assert (row["state"], row["fix"]) == ("warning", fix)
    assert row["detail"] == "gymnasium, libero, maniskill, world_model; not here: metaworld"


def test_broken_engine_installations_are_named_with_their_fix(tmp_path: Path) -> None:
    settings, folder = ServiceSettings(engines_dir=tmp_path), tmp_path / "vllm"
    python = folder / "bin" / "python"

    def finding() -> tuple[str, str, str]:
        found = {one.name: one for one in _engines(settings)}
        assert found["engine sglang"].state == "ok", "an engine that nobody installed is no problem"
        one = found["engine vllm"]
        return one.state, one.detail, one.fix

    install, again = "penstock engines install vllm", "penstock engines install vllm --again"
    python.parent.mkdir(parents=True)
    assert finding() == ("warning", f"engine 'vllm': {folder} has no environment of it", install)
    pins = _digest(_pins("vllm"))
    _write(folder, _Installation(pins, done=0))
    assert finding() == ("warning", f"engine 'vllm': its installation in {folder} was interrupted", install)
    _write(folder, _Installation("of an earlier release", complete=True))
    assert finding() == (
        "warning", f"engine 'vllm': {folder} has other versions than this Penstock needs", install,
    )  # fmt: skip
    _write(folder, _Installation(pins, complete=True))
    state, detail, fix = finding()
    assert (state, fix) == ("warning", again)
    assert f"{python} does not run: " in detail
    python.write_text("#!/bin/sh\necho 'ImportError: libcudart.so.13: cannot open shared object file' >&2\nexit 1\n")
    python.chmod(0o755)
    assert finding() == (
        "warning", "engine 'vllm': ImportError: libcudart.so.13: cannot open shared object file", again,
    )  # fmt: skip
    python.write_text("#!/bin/sh\nexit 0\n")
    assert finding() == ("ok", "installed, and imports", "")
