"""The how-to pages do what they say: their patches apply to a copy of the sources, and their commands succeed there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.shared.config.environment import EnvironmentConfig

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "how-to"
PATCHED = sorted(page.name for page in PAGES.glob("*.md") if "```diff" in page.read_text())
FENCE = re.compile(r"^```(\w+)(?: title=\"[^\"]+\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: str, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall((PAGES / page).read_text()) if kind == language]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Sources and tests, with the links under `src`."""
    left_out = shutil.ignore_patterns("__pycache__", "recorded", "clients")
    for name in ("services", "shared", "src", "tests", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PATCHED)
def test_patches_apply_and_commands_succeed(page: str, copy: Path) -> None:
    for diff in fences(page, "diff"):
        done = run(copy, "git", "apply", "-C1", "-", input=diff)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    for line in "".join(fences(page, "console")).splitlines():
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert program == "pytest", "other programs need a deployment"
        done = run(copy, sys.executable, "-m", "pytest", *arguments)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"


def run(directory: Path, *command: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(directory / "src")}
    return subprocess.run(
        command, cwd=directory, input=input, text=True, capture_output=True, timeout=500, check=False, env=environment
    )


def test_the_tool_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,), (job,) = fences("tool.md", "python"), fences("tool.md", "yaml")
    tmp_path.joinpath("letters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import letters  # type: ignore[import-not-found]

    (tool,) = EnvironmentConfig.model_validate(yaml.safe_load(job)["environment"]).tools
    assert tool.type == "function"
    assert tool.path == "letters:count"
    assert letters.count(word="Strawberry", letter="r") == "3"
    with pytest.raises(ValueError, match="one letter"):
        letters.count(word="a", letter="ab")
