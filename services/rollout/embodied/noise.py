"""Noise of an episode's actions. The job's seed and the episode's identity (its ticket's draw and its index in the
group) determine all values, so they do not depend on other episodes in the batch.

Shapes: C = actions of a decision, A = components of an action.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.ids import Draw, derive_seed

__all__ = ["NoiseSource"]


class NoiseSource:
    """Counter-based random generator of one episode's noise: one block [C, A] for each decision, in order."""

    def __init__(
        self, seed: int, draw: Draw, member: int, *, kind: Literal["normal", "uniform"], shape: tuple[int, int]
    ) -> None:
        key = derive_seed(seed, "episode", draw.ordinal, draw.n, member)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._kind, self._shape = kind, shape

    def next(self, count: int) -> NDArray[np.float32]:
        """Return the blocks of the next ``count`` decisions, [count, C, A]. Call sizes do not affect the values."""
        if self._kind == "normal":
            return self._generator.standard_normal((count, *self._shape), np.float32)
        return self._generator.random((count, *self._shape), np.float32)
