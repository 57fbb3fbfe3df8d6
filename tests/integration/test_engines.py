"""``penstock engines``: interpreters of engines are found, and named if they are missing or incomplete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.deployment import engines as command
from penstock.cli.deployment.engines import interpreter_with
from penstock.cli.deployment.machine import _pythons as pythons_of
from penstock.cli.exits import UNREACHABLE, USAGE
from penstock.local import engines
from penstock.local.engines import engine_problem, engine_python, install_engine
from penstock.shared.config.rollout import ENVIRONMENTS
from penstock.shared.errors import ConfigError, Unavailable


def test_a_missing_engine_names_the_command(tmp_path: Path) -> None:
    environment = {"PENSTOCK_ENGINES_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match="no environment of it; run: penstock engines install vllm"):
        engine_python("vllm", tmp_path)
    listed = CliRunner().invoke(app, ["engines", "ls", "--json"], env=environment)
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert list(rows) == ["embedded", "transformers", *ENVIRONMENTS]
    assert (rows["embedded"]["problem"], rows["vllm"]["python"]) == ("", "")
    assert "penstock engines install vllm" in rows["vllm"]["problem"]
    result = CliRunner().invoke(app, ["engines", "install", "warp"], env=environment)
    assert (result.exit_code, "there is: vllm" in result.output) == (2, True)
    result = CliRunner().invoke(
        app, ["up", "--engine", "warp"], env={**environment, "PENSTOCK_DATA_DIR": str(tmp_path)}
    )
    assert (result.exit_code, "no engine 'warp'" in result.output) == (2, True)


def test_an_interpreter_of_the_user_must_be_there(tmp_path: Path) -> None:
    assert interpreter_with(f"vllm={sys.executable}") == Path(sys.executable)
    with pytest.raises(ConfigError, match="--engine vllm: there is no"):
        interpreter_with(f"vllm={tmp_path}/python")
    with pytest.raises(ConfigError, match="no engine 'warp'"):
        interpreter_with(f"warp={sys.executable}")


def test_up_starts_nothing_if_its_engine_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is begun, and no package index has what it lacks. ``up`` says so, and leaves no deployment."""
    folder, data_dir = tmp_path / "engines" / "vllm", tmp_path / "data"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "vllm.txt").write_text(f"{tmp_path}/first-1.0-py3-none-any.whl\n")
    monkeypatch.setattr(engines, "LOCKS", tmp_path)
    engines._write(folder, engines._Installation(engines._digest(engines._pins("vllm"))))
    environment = {"PENSTOCK_ENGINES_DIR": str(folder.parent), "PENSTOCK_DATA_DIR": str(data_dir)}
    result = CliRunner().invoke(app, ["up", "--engine", "vllm", "--port", "0"], env=environment)
    assert result.exit_code == UNREACHABLE
    assert "first-1.0-py3-none-any.whl failed with exit status 1; the same command goes on" in result.output
    assert "ERROR: " in result.output, "pip's own reason"
    missing = tmp_path / "python"
    result = CliRunner().invoke(app, ["up", "--engine", f"vllm={missing}", "--port", "0"], env=environment)
    assert (result.exit_code, result.output) == (USAGE, f"error: --engine vllm: there is no interpreter {missing}\n")
    result = CliRunner().invoke(
        app, ["demo", "--set", "rollout.engine=vllm", "--data-dir", str(data_dir)], env=environment
    )
    assert result.exit_code == USAGE
    assert "was interrupted; run: penstock engines install vllm" in result.output
    assert not data_dir.exists()


def test_engines_of_one_library_have_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of ``vllm`` run in the environment; workers of ``vllm_server`` get the path of its interpreter."""
    monkeypatch.setenv("PENSTOCK_ENGINES_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_VLLM_PYTHON", "")
    installed: list[str] = []

    def install(name: str, engines_dir: Path, **_: Any) -> Path:
        installed.append(f"{engines_dir}/{name}")
        return Path(sys.executable)

    monkeypatch.setattr(command, "install_engine", install)
    assert pythons_of("vllm") == {"rollout": Path(sys.executable)}
    assert os.environ["PENSTOCK_VLLM_PYTHON"] == ""
    assert pythons_of("vllm_server") == {}
    assert os.environ["PENSTOCK_VLLM_PYTHON"] == sys.executable
    assert CliRunner().invoke(app, ["engines", "install", "vllm_server"]).exit_code == 0
    assert installed == [f"{tmp_path}/vllm"] * 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_installation_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two pip steps fails at first; the next call does not repeat the first step."""
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / "vllm.txt").write_text(f"# wheels\n{wheel(tmp_path, 'first')}\n{tmp_path}/second-1.0-py3-none-any.whl\n")
    monkeypatch.setattr(engines, "LOCKS", pins)
    messages: list[str] = []
    with pytest.raises(Unavailable, match=r"step 2 of 2.* goes on from here"):
        install_engine("vllm", tmp_path, base=Path(sys.executable), report=messages.append)
    assert any("step 1 of 2" in line for line in messages)
    with pytest.raises(ConfigError, match="was interrupted; run: penstock engines install vllm"):
        engine_python("vllm", tmp_path)
    wheel(tmp_path, "second")
    messages.clear()
    with pytest.raises(Unavailable, match="No module named"):  # two small wheels do not make vLLM
        install_engine("vllm", tmp_path, base=Path(sys.executable), report=messages.append)
    assert [line for line in messages if line.startswith("step")] == [
        f"step 2 of 2: {tmp_path}/second-1.0-py3-none-any.whl ..."
    ]
    python = tmp_path / "vllm" / "bin" / "python"
    assert subprocess.run([str(python), "-c", "import first, second"], check=False).returncode == 0
    (pins / "vllm.txt").write_text(f"{tmp_path}/second-1.0-py3-none-any.whl\n")
    with pytest.raises(ConfigError, match=r"interrupted|other versions"):
        engine_python("vllm", tmp_path)


def wheel(folder: Path, name: str) -> Path:
    """Build a wheel with one empty module, and return its path."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.long
@pytest.mark.vllm
def test_a_complete_engine_works_and_is_left_as_it_is(python_with: Callable[[str], Path]) -> None:
    python = python_with("vllm")
    folder = python.parents[2]
    assert engine_problem("vllm", folder) == ""
    messages: list[str] = []
    assert install_engine("vllm", folder, base=Path(sys.executable), report=messages.append) == python
    assert messages == []
