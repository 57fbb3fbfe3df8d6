"""Properties of the environment, besides checkpoint and batches, that a bit-identical replay depends on."""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path

import torch
import transformers

__all__ = ["describe_environment", "environment_differences"]


def describe_environment(*, dtype: str, device: str) -> dict[str, str]:
    """Return library versions, CPU, thread count, ``dtype`` and ``device``; for a GPU also its name."""
    pins = {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "dtype": dtype,
        "device": device,
    }
    if torch.device(device).type == "cuda":
        pins["gpu"] = torch.cuda.get_device_name(device)
    return pins


@functools.cache
def _cpu_model() -> str:
    """Return the name of the CPU. Libraries choose kernels by CPU model, even among CPUs of one instruction set."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def environment_differences(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    """Return one line for each property that differs. If the list is empty, a replay must give the same bits."""
    keys = sorted(saved.keys() | current.keys())
    return [
        f"{key}: checkpoint '{saved.get(key, '')}', here '{current.get(key, '')}'"
        for key in keys
        if saved.get(key) != current.get(key)
    ]
