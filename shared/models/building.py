"""Lock for building models, because a build changes state of the whole process.

While transformers loads weights, it patches functions of torch and then restores what it found: concurrent loads
restore each other's patches, and every later model of the process is then built without data. Random seeds are global,
too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["building"]

_one_at_a_time = threading.RLock()


@contextmanager
def building(seed: int | None = None) -> Iterator[None]:
    """Hold the lock for one build, with the CPU's random state at ``seed``; restore that state afterwards."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
