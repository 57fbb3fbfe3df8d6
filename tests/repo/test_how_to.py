"""The how-to pages are right: their patches apply to a copy of the sources, and their commands succeed there."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.shared.config.environment import EnvironmentConfig

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/how-to"
EXECUTED = sorted(page.name for page in PAGES.glob("*.md") if re.search("^```(console|diff)", page.read_text(), re.M))
FENCE = re.compile(r"^```(\w+)(?: title=\"[^\"]+\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: str, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall((PAGES / page).read_text()) if kind == language]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy of sources and tests, with the links under `src` and with file times, so that compiled files stay valid."""
    left_out = shutil.ignore_patterns("recorded", "clients")
    for name in ("services", "shared", "src", "tests", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", EXECUTED)
def test_patches_apply_and_commands_succeed(page: str, copy: Path) -> None:
    for diff in fences(page, "diff"):
        done = run(copy, "git", "apply", "-C1", "-", input=diff)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    for line in "".join(fences(page, "console")).splitlines():
        variables, program, *arguments = words_of(line)
        assert program == "pytest", "other programs need a deployment"
        done = run(copy, sys.executable, "-m", "pytest", *arguments, **variables)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"


def words_of(line: str) -> tuple[Any, ...]:
    """Return the variables that a command line sets, and its words."""
    words = shlex.split(line.removeprefix("$ "))
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    return variables, *words[len(variables) :]


def run(directory: Path, *command: str, input: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(directory / "src"), variables.get("PYTHONPATH")]))
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=directory, input=input, text=True, capture_output=True, timeout=500, check=False, env=environment
    )


def test_the_engine_of_the_page_is_the_example() -> None:
    """The page shows the core of the file that its commands run, and the section of its job."""
    (code,), (rollout,) = fences("engine.md", "python"), fences("engine.md", "yaml")
    whole = (ROOT / "examples" / "own_engine.py").read_text()
    assert [line for line in code.splitlines() if "def " not in line and line.strip() not in whole] == []
    job = yaml.safe_load((ROOT / "examples" / "own-engine.yaml").read_text())
    assert yaml.safe_load(rollout)["rollout"] == job["rollout"]


def test_the_tool_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
