"""``.ci/run`` names each part that it skips, and skips a part only because a package is missing or time is short."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / ".ci/run").read_text(encoding="utf-8")
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
WANTED = re.compile(r"python_with\(\"vllm\"\)")


INSTALLED = {"vLLM": ("vllm", "PENSTOCK_ENGINES_DIR"), "simulators": ("simulators", "PENSTOCK_SIMS_DIR")}
"""Parts that install packages: the function of the script, and the setting of the folder."""
ROBOT, SIMULATORS, VLLM = (
    "make compose-robot-test",
    "pytest -n0 tests/contract/test_simulators.py",
    "pytest -n0 -m vllm",
)
LATE = "it would begin later than {} s after the start"


def changed(folder: Path, parts: str, **constants: int | str) -> Path:
    """Copy the script, with other parts and constants."""
    script = folder / ".ci" / "run"
    script.parent.mkdir()
    text, _, _ = SCRIPT.partition('\npart "install"')
    for name, value in constants.items():
        text, times = re.subn(rf"(?m)(^| ){name}=\S+", rf"\g<1>{name}={value}", text, count=1)
        assert times == 1, name
    script.write_text(f"{text}\n{parts}", encoding="utf-8")
    return script


def part_without_packages(name: str, folder: Path, kept: Path) -> subprocess.CompletedProcess[str]:
    """Run a part in a copy of the script, where pip reaches no index and finds no wheels."""
    function, setting = INSTALLED[name]
    script = changed(folder, f'part "{name}" {function}\npart "the next" true\n', VLLM_SHM_KIB=0)
    (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "PENSTOCK_"))}
    environment |= {"HOME": str(folder), setting: str(kept)}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )  # fmt: skip


def programs(folder: Path, **texts: str) -> dict[str, str]:
    """Write the programs that the last parts start, which log their arguments; return their environment."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "bin").mkdir()
    pins_are_the_same = "exit 1"
    for name, text in {"python": pins_are_the_same, "penstock": "", "pytest": "", "make": "", **texts}.items():
        program = folder / ("bin" if name == "make" else ".venv/bin") / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/log\n{text}\n')
        program.chmod(0o755)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder)}


@pytest.mark.parametrize(
    ("others", "now", "left_out"),
    [
        (2700, 2700, {}),
        (2700, 3050, {"robot": LATE.format(3000)}),
        (3250, 3350, {"robot": LATE.format(3000), "simulators": LATE.format(3300)}),
        (3250, 3750, {"robot": LATE.format(3000), "simulators": LATE.format(3300), "vLLM": LATE.format(3700)}),
        (3301, 3301, dict.fromkeys(("robot", "simulators", "vLLM"), "everything else took longer than 3300 s")),
    ],
)
def test_the_last_parts_run_where_time_is_left(tmp_path: Path, others: int, now: int, left_out: dict[str, str]) -> None:
    _, _, last = SCRIPT.rpartition("others=$((SECONDS - started))\n")
    environment = programs(tmp_path)
    script = changed(tmp_path, last, others=others, started=f"$((SECONDS-{now}))", VLLM_SHM_KIB=0)
    ended = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert dict(re.findall(r"(?m)^(\w+) +\d+  NOT RUN: (.+)$", ended.stdout)) == left_out
    log = tmp_path / "log"
    ran = log.read_text() if log.exists() else ""
    commands = {"robot": ROBOT, "simulators": SIMULATORS, "vLLM": VLLM}
    assert {name for name, command in commands.items() if command in ran} == commands.keys() - left_out.keys()


def test_the_last_parts_leave_time_for_vllm_and_end_in_ninety_minutes() -> None:
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z]+_[A-Z]*_?S)=(\d+)", SCRIPT)}
    assert re.findall(r'(?m)^part "(\w+)"', SCRIPT)[-4:] == ["compose", "robot", "simulators", "vLLM"]
    assert found["ROBOT_LATEST_S"] + found["ROBOT_LIMIT_S"] <= found["VLLM_LATEST_S"]
    assert found["SIMS_LATEST_S"] + found["SIMS_INSTALL_S"] + 120 <= found["VLLM_LATEST_S"]
    assert found["VLLM_LATEST_S"] + found["VLLM_INSTALL_S"] + 600 <= 90 * 60


@pytest.mark.parametrize("installed", [{"penstock": "exec sleep 60"}, {"pytest": "exit 1"}], ids=["slow", "failing"])
def test_simulators_may_be_missing_but_not_fail(tmp_path: Path, installed: dict[str, str]) -> None:
    environment = programs(tmp_path, **installed)
    script = changed(tmp_path, 'part "simulators" simulators\n', SIMS_INSTALL_S=1)
    ended = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    if "penstock" in installed:
        assert re.search(r"(?m)^simulators +\d+  NOT RUN: its packages were not here after 1 s$", ended.stdout)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    else:
        assert re.search(r"(?m)^simulators +\d+  FAILED$", ended.stdout), ended.stdout + ended.stderr
        assert ended.returncode == 1


def test_every_simulator_with_an_environment_of_its_own_is_tested() -> None:
    contract = ROOT / "tests" / "contract"
    named = re.search(r"(?m)^ELSEWHERE = \((.+)\)$", (contract / "test_simulators.py").read_text(encoding="utf-8"))
    assert named is not None
    simulators = re.findall(r"\w+", named[1])
    assert len(simulators) > 1
    assert f'PENSTOCK_REQUIRE_SIMULATORS="{" ".join(simulators)}"' in SCRIPT
    assert f'-k "{" or ".join(simulators)}" -m ""\n' in SCRIPT
    asking = [path for path in TESTS if "sims_dir(" in path.read_text(encoding="utf-8") and path.parent == contract]
    assert len(asking) > 1
    assert [path.name for path in asking if f"tests/contract/{path.name}" not in SCRIPT] == []


@pytest.mark.parametrize("apt_get", [None, "exit 100"], ids=["no apt-get", "no package"])
def test_a_part_is_skipped_if_libfaketime_cannot_be_installed(tmp_path: Path, apt_get: str | None) -> None:
    programs, script = tmp_path / "bin", tmp_path / ".ci" / "run"
    programs.mkdir()
    for name in ("bash", "dirname", "git", "mkdir"):
        (programs / name).symlink_to(str(shutil.which(name)))
    if apt_get is not None:
        (programs / "apt-get").write_text(f"#!/bin/sh\n{apt_get}\n")
        (programs / "apt-get").chmod(0o755)
    script.parent.mkdir()
    before, _, _ = SCRIPT.replace("/usr/lib/*/faketime", f"{tmp_path}/*/faketime").partition('\npart "install"')
    script.write_text(f'{before}\npart "wrong clocks" wrong_clocks\n', encoding="utf-8")
    environment = {"PATH": str(programs), "HOME": str(tmp_path)}
    command = [str(programs / "bash"), str(script)]

    def ended() -> str:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    left_out = r"^wrong clocks +\d+  NOT RUN: no libfaketime here, and apt-get cannot install it"
    assert re.search(left_out, ended(), re.MULTILINE)
    (tmp_path / "x86_64" / "faketime").mkdir(parents=True)
    (tmp_path / "x86_64" / "faketime" / "libfaketime.so.1").touch()
    assert ended().endswith("\nPASSED\n")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", INSTALLED)
def test_a_part_is_skipped_if_its_packages_cannot_be_had(tmp_path: Path, name: str) -> None:
    ended = part_without_packages(name, tmp_path, tmp_path / "kept")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(rf"^{name} +\d+  NOT RUN: pip did not get its packages$", ended.stdout, re.MULTILINE)
    assert re.search(r"^the next +\d+$", ended.stdout, re.MULTILINE)
    assert ended.stdout.endswith(f"\nPASSED, but these parts were not run: {name}\n")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_a_part_fails_if_its_installation_has_another_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    ended = part_without_packages(name, tmp_path, tmp_path / "file" / "kept")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(rf"^{name} +\d+  FAILED$", ended.stdout, re.MULTILINE) and "NOT RUN" not in ended.stdout
    assert "the next" not in ended.stdout and ended.stdout.endswith("\nFAILED (exit status 1)\n")


def test_tests_that_need_vllm_are_marked() -> None:
    """The part selects tests by the mark `vllm`; other parts exclude these tests, because they are long or marked."""
    asking = [path for path in TESTS if WANTED.search(path.read_text(encoding="utf-8"))]
    assert len(asking) > 2
    for path in asking:
        assert {"vllm", "long"} <= {*re.findall(r"mark\.(\w+)", path.read_text(encoding="utf-8"))}, path
    assert 'tests -m "long and not vllm"\n' in SCRIPT and "tests -n0 -m vllm\n" in SCRIPT


def test_long_tests_and_those_of_vllm_are_marked_in_their_own_files() -> None:
    """``tests/conftest.py`` imports only files with such a mark if only these tests are selected."""
    helpers = {*(ROOT / "tests").rglob("*.py")} - {*TESTS}
    assert [path for path in helpers if re.search(r"mark\.(long|vllm)", path.read_text(encoding="utf-8"))] == []
