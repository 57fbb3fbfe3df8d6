"""The installed package: one top-level name, and a control plane without torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIGHT = ["penstock.client", "penstock.shared.protocol", "penstock.shared.config", "penstock.shared.transport",
         "penstock.shared.runtime", "penstock.services.coordinator"]  # fmt: skip


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a user would: outside the repository, with only the installed environment."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize("name", ["shared", "services"])
def test_bare_names_are_not_installed(name: str, tmp_path: Path) -> None:
    result = python(f"import {name}", tmp_path)
    assert result.returncode == 1 and f"No module named '{name}'" in result.stderr


def test_the_full_names_are_installed(tmp_path: Path) -> None:
    result = python("import penstock.shared.errors, penstock.services; print(penstock.__version__)", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_control_plane_never_imports_torch(tmp_path: Path) -> None:
    """One process imports all packages, each one after the earlier ones."""
    code = f"""
import importlib, pkgutil, sys
for name in {LIGHT}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{{name}}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    heavy = sorted({{"torch", "transformers", "vllm", "sglang"}} & set(sys.modules))
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    result = python(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_import_contracts_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout[-4000:]


def test_the_symlinks_of_the_editable_install_are_there() -> None:
    for name in ("shared", "services"):
        assert (ROOT / "src/penstock" / name).resolve() == ROOT / name


def test_the_wheel_holds_every_module_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    front = [
        path for path in (ROOT / "src/penstock").rglob("*.py") if not path.resolve().is_relative_to(ROOT / "shared")
    ]
    front = [path for path in front if not path.resolve().is_relative_to(ROOT / "services")]
    expected = [str(path.relative_to(ROOT / "src")) for path in front]
    expected += [
        f"penstock/{path.relative_to(ROOT)}" for name in ("shared", "services") for path in (ROOT / name).rglob("*.py")
    ]
    assert sorted(packed) == sorted(expected)


def test_the_lock_file_has_hashes_for_the_dependencies() -> None:
    """torch is not in the file, because its wheels differ by index; ``make lock`` writes the file."""
    text = (ROOT / "deploy/requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", text.strip())
    locked = {re.split(r"[=\[ ]", entry, maxsplit=1)[0].lower().replace("_", "-") for entry in entries}
    assert all("--hash=sha256:" in entry and "==" in entry.splitlines()[0] for entry in entries)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in project["dependencies"]
    }
    assert named <= locked
    assert "torch" not in locked
