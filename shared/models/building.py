"""One thread at a time builds a model, because a build changes state that the whole process shares.

transformers replaces functions of torch while it loads weights and puts back what it found: two loads at once put back
each other's replacements, and every later model of the process then stays without data. Seeds are of the process, too.
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
    """Hold the process for one build, with the CPU's random state at ``seed``; afterwards that state is as it was."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
