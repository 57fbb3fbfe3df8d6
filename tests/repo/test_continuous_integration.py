"""``.ci/run`` names each part that it skips, and skips a part only because a package is missing."""

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


def vllm_part(folder: Path, engines: Path) -> subprocess.CompletedProcess[str]:
    """Run the part "vLLM" in a copy of the script, where pip reaches no index and finds no wheels."""
    script = folder / ".ci" / "run"
    script.parent.mkdir()
    before, _, _ = SCRIPT.partition('\npart "install"')
    script.write_text(f'{before}\npart "vLLM" vllm\npart "the next" true\n', encoding="utf-8")
    (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "PENSTOCK_"))}
    environment |= {"HOME": str(folder), "PENSTOCK_ENGINES_DIR": str(engines)}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )  # fmt: skip


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
def test_a_part_is_skipped_if_vllm_cannot_be_installed(tmp_path: Path) -> None:
    ended = vllm_part(tmp_path, tmp_path / "engines")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^vLLM +\d+  NOT RUN: pip did not get its packages$", ended.stdout, re.MULTILINE)
    assert re.search(r"^the next +\d+$", ended.stdout, re.MULTILINE)
    assert ended.stdout.endswith("\nPASSED, but these parts were not run: vLLM\n")


@pytest.mark.long
@pytest.mark.slow
def test_a_part_fails_if_its_installation_has_another_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = vllm_part(tmp_path, tmp_path / "file" / "engines")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"^vLLM +\d+  FAILED$", ended.stdout, re.MULTILINE) and "NOT RUN" not in ended.stdout
    assert "the next" not in ended.stdout and ended.stdout.endswith("\nFAILED (exit status 1)\n")


def test_tests_that_need_vllm_are_marked() -> None:
    """The part selects tests by the mark `vllm`; other parts exclude these tests, because they are long or marked."""
    asking = [path for path in TESTS if WANTED.search(path.read_text(encoding="utf-8"))]
    assert len(asking) > 2
    for path in asking:
        assert {"vllm", "long"} <= {*re.findall(r"mark\.(\w+)", path.read_text(encoding="utf-8"))}, path
    assert 'tests -m "long and not vllm and not sglang"\n' in SCRIPT and "tests -n0 -m vllm\n" in SCRIPT


def test_long_tests_and_those_of_vllm_are_marked_in_their_own_files() -> None:
    """``tests/conftest.py`` imports only files with such a mark if only these tests are selected."""
    helpers = {*(ROOT / "tests").rglob("*.py")} - {*TESTS}
    assert [path for path in helpers if re.search(r"mark\.(long|vllm)", path.read_text(encoding="utf-8"))] == []
