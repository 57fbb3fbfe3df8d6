"""Starts the process of a service, with the environment variables that it may see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Protocol, TypeAlias

import penstock
from penstock.local.leash import leashed
from penstock.shared.config.service import ServiceSettings

__all__ = ["Launch", "Process", "interpreter", "interpreter_of", "service_environment"]

_PASSED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "VIRTUAL_ENV", "NO_PROXY",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "no_proxy", "http_proxy", "https_proxy", "all_proxy", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "FAKETIME", "DISPLAY", "PYOPENGL_PLATFORM",
})  # fmt: skip
_PREFIXES = (
    "LC_", "LD_", "DYLD_", "PYTHON", "COVERAGE_", "XDG_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "TORCH",
    "PYTORCH_", "ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "TRITON_", "MALLOC_",
    "FAKETIME_", "ROCR_", "HIP_", "MUJOCO_", "SDL_", "MESA_", "LIBGL_", "EGL_", "GALLIUM_",
)  # fmt: skip
"""Prefixes of environment variables of the interpreter, its libraries and the hardware, which all services may see."""
_HUB_PREFIXES = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "VLLM_", "SGLANG_", "TOKENIZERS_")
"""Prefixes of variables about models and data sets. Names that end in TOKEN reach only services that load models."""
_HUB = frozenset({"rollout", "trainer", "reward"})
_TRACKERS = ("WANDB_", "MLFLOW_", "SWANLAB_")
_COORDINATOR_ONLY = frozenset(
    f"PENSTOCK_{name}"
    for name in (
        "API_KEYS", "OPEN_LOOPBACK", "REDIS_URL", "FORWARDED_ALLOW_IPS", "GRADER_URL", "GRADER_KEY_ENV", "BASE_MODELS",
        "WEBHOOK_PRIVATE",
    )
)  # fmt: skip
_SETTINGS = frozenset(f"PENSTOCK_{name.upper()}" for name in ServiceSettings.model_fields)


def service_environment(service: str, inherited: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a service's process: the variables of ``inherited`` and ``own`` that the service may
    see.

    A worker may run user code, so it never gets an API key, nor other secrets from the shell that started it.
    ``PENSTOCK_WORKER_ENV`` names further variables for workers, ``PENSTOCK_SCORER_ENV`` for reward.
    """
    leads, both = service == "coordinator", {**inherited, **own}
    named = both.get("PENSTOCK_WORKER_ENV", "")
    if service == "reward":
        named += "," + both.get("PENSTOCK_SCORER_ENV", "")
    extra = {name.strip() for name in named.split(",")}
    prefixes = _PREFIXES + (_TRACKERS if leads else ())
    settings = _SETTINGS if leads else _SETTINGS - _COORDINATOR_ONLY
    return {
        name: value
        for name, value in both.items()
        if (name in own and (leads or name not in _COORDINATOR_ONLY))
        or name in _PASSED or name in settings or name in extra or name.startswith(prefixes)
        or (name.startswith(_HUB_PREFIXES) and (service in _HUB or not name.endswith("TOKEN")))
    }  # fmt: skip


class Process(Protocol):
    """The part of ``subprocess.Popen`` that a supervisor uses. The process id is also the session id."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process is alive."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM; does nothing if the process has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the process has ended."""
        ...


Launch: TypeAlias = Callable[[str, Mapping[str, str], IO[bytes]], Process]
"""``launch(module, environment, log)`` runs a module as a program that dies with its starter. ``environment`` is its
whole environment; ``log`` receives its standard output and error."""


def interpreter(module: str, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` with this interpreter. The kernel kills the process when the thread that starts it
    ends."""
    return _start(sys.executable, module, environment, log)


def interpreter_of(python: Path, folder: Path) -> Launch:
    """Return a ``Launch`` with the interpreter ``python``, whose environment has the libraries that Penstock needs but
    not Penstock itself.

    A link in ``folder`` lets the started process import the same Penstock code as this one, so that both sides of every
    message agree.
    """
    own = folder / "penstock"
    folder.mkdir(parents=True, exist_ok=True)
    own.unlink(missing_ok=True)
    own.symlink_to(Path(penstock.__file__).parent, target_is_directory=True)
    return partial(_with_code, str(python), str(folder))


def _with_code(
    python: str, folder: str, module: str, environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
    found = f"{Path(python).parent}{os.pathsep}{environment.get('PATH', '')}"
    return _start(python, module, {**environment, "PYTHONPATH": path, "PATH": found}, log)


def _start(python: str, module: str, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        leashed([python, "-m", module]),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(environment),
        umask=0o077,
        start_new_session=True,  # Ctrl-C reaches only the supervisor, which then stops everything in order
    )
