"""megatron-core on the CPU.

megatron-core allocates on ``torch.cuda.current_device()``, which without CUDA raises. For a model on the CPU that call
names the CPU while megatron-core runs. For a model on a GPU nothing is changed.
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
    """Within, megatron-core allocates on ``device``."""
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
    """As ``allocating_on``, for the pipeline schedules too: they count tokens on a device that they call "cuda"."""
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
