"""The tests of the embedded engine, run for vLLM in its interpreter and for its HTTP server."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock

pytestmark = [pytest.mark.long, pytest.mark.vllm]

TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "execnet", "pluggy", "iniconfig")
"""Packages of pure Python that the tests need and the interpreter of an engine lacks."""
LIMIT_S = 2400


def linked(folder: Path) -> Path:
    """Create a folder from which the interpreter of vLLM imports this code and the tools of the tests; return it."""
    folder.mkdir()
    (folder / "penstock").symlink_to(Path(penstock.__file__).parent, target_is_directory=True)
    for name in TOOLS:
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


@pytest.mark.timeout(LIMIT_S + 60)
def test_vllm_keeps_the_contract(
    tmp_path: Path, python_with: Callable[[str], Path], run_contract: Callable[..., None]
) -> None:
    python = python_with("vllm")
    environment = {
        "PYTHONPATH": str(linked(tmp_path / "code")), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    run_contract("vllm", python, ["reference_updates.py"], environment, limit_s=LIMIT_S)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_server_of_vllm_keeps_the_contract(
    python_with: Callable[[str], Path], run_contract: Callable[..., None]
) -> None:
    """The tests and the adapter run in this interpreter, and only the server in that of vLLM."""
    files = ["reference_updates.py", "vllm_server_updates.py", "server_requests.py"]
    environment = {"PENSTOCK_VLLM_PYTHON": str(python_with("vllm")), "OMP_NUM_THREADS": "1"}
    run_contract("vllm_server", Path(sys.executable), files, environment, limit_s=LIMIT_S)
