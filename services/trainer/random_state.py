"""The random generators of a process as tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["random_state", "set_random_state"]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return copies of the states of the CPU and GPU generators, uint8, by device type."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the result of ``random_state``. If ``state`` has no GPU state, the GPU generator stays as it is."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
