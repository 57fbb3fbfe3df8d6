"""Comparison of a replay in another environment with the original training.

Another CPU type, torch version, device or number of threads gives other bits. Two quantities are comparable then: the
gradient norm that each update reported, and the weights of later checkpoints. Weight differences are relative to the
distance that training moved the weights since the replay's first checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.services.trainer.learners.job_learner import JobLearner

__all__ = ["BOUNDS", "COARSE_BOUND", "ReplayTolerance", "copy_weights", "distance"]

BOUNDS = {"float32": 0.01}
"""Largest allowed relative differences of gradient norms and of weights, by dtype of the weights. The distance of
replayed weights from a checkpoint is relative to that checkpoint's distance from the replay's first one. For float32,
both differences were 1e-6 after 24 updates with AVX512 in one run and no vector instructions in the other; they grow
with updates.
"""
COARSE_BOUND = 0.05
"""Largest allowed difference, as in ``BOUNDS``, for all other dtypes."""

Weights = Mapping[str, Tensor]


def copy_weights(learner: JobLearner) -> dict[str, Tensor]:
    """Return the published weights on the CPU. Float64 tensors are left out: they are statistics of observations, among
    them counts, which are so large that they would dominate the distance between two sets of weights."""
    weights = ((name, tensor) for name, tensor in learner.weights() if tensor.dtype != torch.float64)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}


def distance(a: Weights, b: Weights) -> float:
    """Return the Euclidean distance of two sets of weights over all their elements, in float64."""
    squares = (torch.sum((a[name].double() - b[name].double()) ** 2).item() for name in a)
    return math.sqrt(math.fsum(squares))


@dataclass(slots=True)
class ReplayTolerance:
    """Collects the differences of a replay from the original training.

    ``start``: weights of the replay's first checkpoint; ``dtype``: type of the weights.
    """

    start: Weights
    dtype: str = "float32"
    gradients: list[float] = field(default_factory=list)
    """Relative differences of gradient norms."""
    weights: dict[int, float] = field(default_factory=dict)
    """Relative distance of the weights, by number of the batch after which the compared checkpoint was written."""

    def gradient(self, replayed: float | None, recorded: float | None) -> str:
        """Compare the replayed with the recorded gradient norm of an update; return a text, '' if a norm is None."""
        if replayed is None or recorded is None:
            return ""
        off = abs(replayed - recorded) / max(abs(recorded), torch.finfo(torch.float32).tiny)
        self.gradients.append(off)
        return f"gradient norm off by {off:.1e} (bound {self.bound:g})"

    def checkpoint(self, batch: int, replayed: Weights, recorded: Weights) -> str:
        """Compare the weights after ``batch``. Return the result as text."""
        way = distance(recorded, self.start)
        apart = distance(replayed, recorded)
        off = apart / way if way else math.inf if apart else 0.0
        self.weights[batch] = off
        return f"weights off by {off:.1e} of the way trained (bound {self.bound:g})"

    @property
    def bound(self) -> float:
        """Largest allowed relative difference for ``dtype``."""
        return BOUNDS.get(self.dtype, COARSE_BOUND)

    @property
    def compared(self) -> bool:
        """Return True if at least one comparison was made."""
        return bool(self.gradients or self.weights)

    @property
    def within(self) -> bool:
        """Return True if all differences are within the bound."""
        return all(off <= self.bound for off in (*self.gradients, *self.weights.values()))

    def summary(self) -> str:
        """Return the comparison and its largest differences as text."""
        if not self.compared:
            return "nothing that was recorded can be compared"
        parts = []
        if self.gradients:
            parts.append(f"{len(self.gradients)} gradient norms off by at most {max(self.gradients):.1e}")
        for batch, off in self.weights.items():
            parts.append(f"weights of checkpoint {batch} by {off:.1e} of the way trained")
        verdict = "within" if self.within else "OUTSIDE"
        return f"{', '.join(parts)}: {verdict} the bound of {self.bound:g}"
