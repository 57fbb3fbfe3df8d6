"""The contract of rollout engines, run in the interpreter of vLLM: the same tests as for the embedded engine."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock

HERE = Path(__file__).parent
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "execnet", "pluggy", "iniconfig")
"""Pure Python; the interpreter of an engine has none of them."""
FILES = ("test_engine_control.py", "test_engine_updates.py", "test_engine_generate.py", "reference_updates.py")
ENDS = ("test_engine_control.py::test_resume_and_close_are_safe_to_repeat",
        "test_engine_generate.py::test_close_fails_what_is_in_flight")  # fmt: skip
"""They end the engine, which takes long to start: the second one runs at the end, after a process was killed."""
LIMIT_S = 2400


def linked(folder: Path) -> Path:
    """A folder from which that interpreter imports this code and the tools of the tests."""
    folder.mkdir()
    (folder / "penstock").symlink_to(Path(penstock.__file__).parent, target_is_directory=True)
    for name in TOOLS:
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_vllm_keeps_the_contract(tmp_path: Path, python_with: Callable[[str], Path]) -> None:
    python = python_with("vllm")
    environment = {
        **os.environ, "PYTHONPATH": str(linked(tmp_path / "code")), "PENSTOCK_TEST_ENGINE": "vllm",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    settings = (
        "addopts=", "filterwarnings=", "timeout=600", "asyncio_default_fixture_loop_scope=session",
        "asyncio_default_test_loop_scope=session",
    )  # fmt: skip
    command = [str(python), "-m", "pytest", "-ra", "--tb=short", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command += [word for setting in settings for word in ("-o", setting)]
    command += [str(HERE / name) for name in FILES]
    command += [word for name in ENDS[:1] for word in ("--deselect", str((HERE / name).relative_to(HERE.parents[2])))]
    log = tmp_path / "pytest.log"
    with log.open("wb") as output:
        result = subprocess.run(
            command, cwd=HERE.parents[2], env=environment, stdout=output, stderr=output, timeout=LIMIT_S, check=False
        )
    lines = log.read_text(errors="replace").splitlines()
    assert result.returncode == 0, "\n".join(lines[-80:])
