"""Context managers that run megatron-core on the CPU.

megatron-core allocates on ``torch.cuda.current_device()``, which raises without CUDA. For a model on the CPU, that call
returns the CPU inside these contexts. For a model on a GPU they change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["allocating_on", "scheduling_on"]


@contextmanager
def allocating_on(device: torch.device) -> Iterator[None]:
    """Let megatron-core allocate on ``device`` within the context."""
    if device.type == "cuda":
        yield
        return
    original = torch.cuda.current_device
    torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = original


@contextmanager
def scheduling_on(device: torch.device) -> Iterator[None]:
    """Extend ``allocating_on`` to megatron-core's pipeline schedules, which allocate their token counter on the device
    "cuda"."""
    with allocating_on(device):
        if device.type == "cuda":
            yield
            return
        with _CudaMeans(device):
            yield


class _CudaMeans(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": self._device} if kwargs.get("device") == "cuda" else kwargs))
