"""megatron-core on the CPU.

megatron-core allocates on ``torch.cuda.current_device()``, which without CUDA raises. For a model on the CPU that call
names the CPU while megatron-core runs. For a model on a GPU nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["allocating_on"]


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
