"""Wall time of the stages of training, including pending work of the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from penstock.services.trainer.backends.base import Seconds

__all__ = ["Stopwatch"]


class Stopwatch:
    """Accumulates ``Seconds`` on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, Seconds()

    @contextmanager
    def measure(self, stage: Literal["forward", "backward", "optimizer"]) -> Iterator[None]:
        """Add the duration of the block to ``stage``. A block that raises does not count."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        setattr(self._seconds, stage, getattr(self._seconds, stage) + time.perf_counter() - start)

    def take(self) -> Seconds:
        """Return the seconds since the last call, and reset them."""
        taken, self._seconds = self._seconds, Seconds()
        return taken
