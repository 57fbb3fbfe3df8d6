"""``penstock sims``: interpreters of simulators are created, found, and named if they are missing."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.deployment import sims as command
from penstock.services.env.simulators import INSTALLED, interpreter_of, open_simulator
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.embodied.environment import OpenEnv


def test_a_simulator_that_is_not_installed_names_the_command(tmp_path: Path) -> None:
    """The simulator's interpreter exists, but its library is missing."""
    python = tmp_path / "metaworld" / "bin" / "python"
    python.parent.mkdir(parents=True)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    blocker = "import sys; sys.modules['metaworld'] = None; sys.path.append(%r)" % site  # noqa: UP031
    python.write_text(
        "#!/bin/sh\nshift\nexec " + sys.executable + " -c \"" + blocker
        + "; import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\" \"$@\"\n"
    )  # fmt: skip
    python.chmod(0o755)
    (tmp_path / "metaworld" / INSTALLED).write_text("{}")
    with pytest.raises(ConfigError, match="penstock sims install metaworld"):
        open_simulator(OpenEnv(env_id="reach-v3", num_envs=1, backend="metaworld"), tmp_path)


@pytest.mark.parametrize(
    ("library", "advice"),
    [
        ("libGL.so.1", "run `apt-get install -y libgl1` on the host"),
        ("libother-2.so.7", "install the system package that has libother-2.so.7 on the host"),
    ],
)
def test_a_simulator_without_a_library_of_the_system_names_it(tmp_path: Path, library: str, advice: str) -> None:
    """The modules of the simulator are installed, and one of them cannot load a shared library."""
    loader = tmp_path / "metaworld.py"
    loader.write_text(f"raise ImportError('{library}: cannot open shared object file: No such file or directory')\n")
    python = tmp_path / "metaworld" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "metaworld" / INSTALLED).write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(advice)):
        open_simulator(OpenEnv(env_id="reach-v3", num_envs=1, backend="metaworld"), tmp_path)


def test_libraries_of_the_system_are_looked_for_before_anything_is_installed(tmp_path: Path) -> None:
    """The interpreter finds no shared library, as on a machine without a desktop."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'OSError: cannot open shared object file' >&2\nexit 1\n")
    python.chmod(0o755)
    environment = {"PENSTOCK_SIMS_DIR": str(tmp_path / "sims")}
    result = CliRunner().invoke(app, ["sims", "install", "maniskill", "--python", str(python)], env=environment)
    assert result.exit_code == 2, result.output
    assert "apt-get install -y libx11-6 libgl1 libglib2.0-0" in " ".join(result.output.split())
    assert not (tmp_path / "sims").exists()


def test_an_interpreter_counts_once_its_installation_is_complete(tmp_path: Path) -> None:
    python = tmp_path / "metaworld" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert interpreter_of("metaworld", tmp_path) == sys.executable
    (tmp_path / "metaworld" / INSTALLED).write_text("{}")
    assert interpreter_of("metaworld", tmp_path) == str(python)


@pytest.mark.long
def test_installing_an_unknown_simulator_is_an_error(tmp_path: Path) -> None:
    environment = {"PENSTOCK_SIMS_DIR": str(tmp_path)}
    result = CliRunner().invoke(app, ["sims", "install", "holodeck"], env=environment)
    assert (result.exit_code, "there is: gymnasium, libero, maniskill, metaworld" in result.output) == (2, True)
    listed = CliRunner().invoke(app, ["sims", "ls", "--json"], env=environment)
    assert [row["name"] for row in json.loads(listed.stdout)] == [
        "gymnasium", "libero", "maniskill", "metaworld", "world_model",
    ]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.long
def test_an_installed_interpreter_runs_its_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no Penstock installed; the child process needs none."""
    monkeypatch.setenv("PENSTOCK_SIMS_DIR", str(tmp_path))
    result = CliRunner().invoke(command.app, ["install", "gymnasium"])
    assert result.exit_code == 0, result.output
    simulator = open_simulator(OpenEnv(env_id="Hopper-v5", num_envs=2), tmp_path)
    try:
        started = simulator.reset(np.arange(2, dtype=np.int32), np.asarray([4, 4]))
        assert started.lost == {}
        assert started.state_hashes[0] == started.state_hashes[1]
        assert interpreter_of("gymnasium", tmp_path) == str(tmp_path / "gymnasium" / "bin" / "python")
    finally:
        simulator.close()


OWN = Path(__file__).parents[2] / "examples" / "own_simulator.py"


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_custom_simulator_is_installed_listed_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SIMS_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["sims", "install", "puck", "--adapter", str(OWN)])
    assert result.exit_code == 0, result.output
    listed = json.loads(CliRunner().invoke(app, ["sims", "ls", "--json"]).stdout)
    assert {row["name"]: row["problem"] for row in listed}["puck"] == ""
    request = OpenEnv(env_id="rest-at-goal", num_envs=2, backend="puck", options={"horizon": 3})
    simulator = open_simulator(request, tmp_path)
    try:
        both = np.arange(2, dtype=np.int32)
        started = simulator.reset(both, np.asarray([4, 4]))
        assert started.tasks == ["bring the puck to rest at the goal"] * 2
        assert started.state_hashes[0] == started.state_hashes[1]
        chunk = simulator.step(both, np.ones((2, 4, 2), np.float32), None)
        assert (chunk.valid.tolist(), chunk.truncated[:, 2].tolist()) == ([3, 3], [True, True])
    finally:
        simulator.close()


@pytest.mark.parametrize(
    ("name", "adapter", "message"),
    [
        ("libero", "counter.py", "'libero' cannot name a simulator of your own"),
        ("../mine", "counter.py", "'../mine' cannot name a simulator of your own"),
        ("mine", "missing.py", "there is no file"),
    ],
)
def test_an_invalid_adapter_is_refused(tmp_path: Path, name: str, adapter: str, message: str) -> None:
    shutil.copyfile(OWN, tmp_path / "counter.py")
    result = CliRunner().invoke(app, ["sims", "install", name, "--adapter", str(tmp_path / adapter)])
    assert (result.exit_code, message in result.output.replace("\n", " ")) == (2, True), result.output


def test_an_unknown_simulator_names_the_way_to_a_custom_one(tmp_path: Path) -> None:
    """This also holds for a name that would lead out of the folder of simulators."""
    (tmp_path / "sims" / "mine").mkdir(parents=True)
    shutil.copyfile(OWN, tmp_path / "sims" / "mine" / "adapter.py")
    for name in ("warp", "../sims/mine"):
        with pytest.raises(
            ConfigError, match=r"gymnasium, libero, maniskill, metaworld, mine, world_model\. An adapter of your own"
        ):
            open_simulator(OpenEnv(env_id="x", num_envs=1, backend=name), tmp_path / "sims")
