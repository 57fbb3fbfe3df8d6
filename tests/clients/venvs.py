"""Create the environments of the clients: ``python tests/clients/venvs.py [NAME ...]``; without names, all of them.

Each is in ``PENSTOCK_CLIENTS_DIR/NAME`` (default: ``.clients/NAME``) and holds what ``requirements/NAME.txt`` pins.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["make", "names", "python_of"]

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parents[1] / ".clients"
AT_ONCE = 2


def names() -> list[str]:
    """Return the names of all clients."""
    return sorted(file.stem for file in (HERE / "requirements").glob("*.txt"))


def python_of(name: str) -> Path | None:
    """Return the interpreter of a client's environment; None if there is none with the current requirements."""
    folder = _folder(name)
    made = folder / "requirements.txt"
    return folder / "bin" / "python" if made.is_file() and made.read_text() == _wanted(name).read_text() else None


def make(name: str) -> None:
    """Create a client's environment anew. Raises CalledProcessError if a requirement cannot be installed."""
    folder = _folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--requirement", str(_wanted(name))], check=True)
    if list(folder.glob("lib/python*/site-packages/nvidia*")):
        raise SystemExit(f"{name}: its requirements install CUDA libraries; pin torch's CPU build, or leave torch out")
    shutil.copy(_wanted(name), folder / "requirements.txt")  # last: the file shows that the installation is complete


def _folder(name: str) -> Path:
    return Path(os.environ.get("PENSTOCK_CLIENTS_DIR") or DEFAULT) / name


def _wanted(name: str) -> Path:
    return HERE / "requirements" / f"{name}.txt"


def _made(name: str) -> str:
    began = time.monotonic()
    make(name)
    return f"{name:20} {time.monotonic() - began:6.1f} s"


def main() -> None:
    """Create the environments that are missing."""
    wanted = sys.argv[1:] or names()
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        raise SystemExit(f"no client {', '.join(unknown)}; there are: {', '.join(names())}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in pool.map(_made, (name for name in wanted if python_of(name) is None)):
            print(line)


if __name__ == "__main__":
    main()
