"""Makes an environment in which SGLang's own server starts on a CPU: the real server with fake kernels.

It is for contract tests only, and not for users. SGLang's HTTP server, scheduler, radix cache and weight updater are
the real ones. Its compiled kernels (``sgl_kernel``) exist for GPUs only; ``kernels`` has stubs in plain torch for those
that a small dense model needs, and empty modules instead of torchvision and IPython. A run therefore says nothing about
SGLang's speed, about its kernels, or about any other model.

The environment, ``sglang-cpu`` in PENSTOCK_ENGINES_DIR, has the packages of ``requirements.txt`` and sees those of
vLLM's environment (``penstock engines install vllm``), which it does not change. torch is therefore not the version
that SGLang pins.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

from penstock.local.engines import engine_python
from penstock.shared.config.service import load_settings

PINS = Path(__file__).parent / "requirements.txt"
NAME = "sglang-cpu"


def packages_of(python: Path) -> str:
    """Return the folder in which an interpreter keeps its packages."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Make the environment if it is missing, incomplete or has other pins; print its interpreter."""
    engines = load_settings().engines_dir.expanduser()
    vllm, folder = engine_python("vllm", engines), engines / NAME
    python, made = folder / "bin" / "python", folder / "made"
    pins = hashlib.sha256(f"{PINS.read_text()}{packages_of(vllm)}".encode()).hexdigest()
    with (engines / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file() or made.read_text() != pins:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([str(vllm), "-m", "venv", str(folder)], check=True)
            (Path(packages_of(python)) / "vllm.pth").write_text(f"{packages_of(vllm)}\n")
            pip = [str(python), "-m", "pip", "--no-input", "install", "--quiet", "--no-deps", "-r", str(PINS)]
            subprocess.run(pip, check=True)
            made.write_text(pins)
    print(python)


if __name__ == "__main__":
    main()
