"""How near a replay on another environment comes to what was trained there.

On another kind of CPU, torch, device or number of threads the same updates give other bits. Two things can be compared
then: the gradient norm that each update reported, and the weights of later checkpoints, in units of the way that
training went from the checkpoint that the replay started from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.services.trainer.learners.job_learner import JobLearner

__all__ = ["BOUNDS", "COARSE_BOUND", "Nearness", "copy_weights", "distance"]

BOUNDS = {"float32": 0.01}
"""By dtype of the weights: largest relative difference of a gradient norm, and largest distance of the replayed weights
from a checkpoint's, relative to the way from the first checkpoint to it. AVX512 against no vector instructions in
float32 came to 1e-6 of both over 24 updates; the differences grow with the number of updates."""
COARSE_BOUND = 0.05
"""For dtypes with fewer bits."""

Weights = Mapping[str, Tensor]


def copy_weights(learner: JobLearner) -> dict[str, Tensor]:
    """The published weights, on the CPU; without statistics in float64, whose counts would drown what is trained."""
    weights = ((name, tensor) for name, tensor in learner.weights() if tensor.dtype != torch.float64)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}


def distance(a: Weights, b: Weights) -> float:
    """Euclidean distance of two sets of weights over all their elements, in float64."""
    squares = (torch.sum((a[name].double() - b[name].double()) ** 2).item() for name in a)
    return math.sqrt(math.fsum(squares))


@dataclass(slots=True)
class Nearness:
    """The comparison. ``start``: weights of the checkpoint that the replay started from; ``dtype``: of them."""

    start: Weights
    dtype: str = "float32"
    gradients: list[float] = field(default_factory=list)
    """Relative differences of gradient norms."""
    weights: dict[int, float] = field(default_factory=dict)
    """Batch of a checkpoint -> relative distance of the weights."""

    def gradient(self, replayed: float | None, recorded: float | None) -> str:
        """Compare the gradient norms of one update; says what came out, '' where there is nothing to compare."""
        if replayed is None or recorded is None:
            return ""
        off = abs(replayed - recorded) / max(abs(recorded), torch.finfo(torch.float32).tiny)
        self.gradients.append(off)
        return f"gradient norm off by {off:.1e} (bound {self.bound:g})"

    def checkpoint(self, batch: int, replayed: Weights, recorded: Weights) -> str:
        """Compare the weights after ``batch``; says what came out."""
        way = distance(recorded, self.start)
        apart = distance(replayed, recorded)
        off = apart / way if way else math.inf if apart else 0.0
        self.weights[batch] = off
        return f"weights off by {off:.1e} of the way trained (bound {self.bound:g})"

    @property
    def bound(self) -> float:
        """Bounds of the comparison."""
        return BOUNDS.get(self.dtype, COARSE_BOUND)

    @property
    def compared(self) -> bool:
        """True if there was anything to compare."""
        return bool(self.gradients or self.weights)

    @property
    def within(self) -> bool:
        """Everything that was compared is within the bound."""
        return all(off <= self.bound for off in (*self.gradients, *self.weights.values()))

    def summary(self) -> str:
        """The comparison and its largest difference, in words."""
        if not self.compared:
            return "nothing that was recorded can be compared"
        parts = []
        if self.gradients:
            parts.append(f"{len(self.gradients)} gradient norms off by at most {max(self.gradients):.1e}")
        for batch, off in self.weights.items():
            parts.append(f"weights of checkpoint {batch} by {off:.1e} of the way trained")
        verdict = "within" if self.within else "OUTSIDE"
        return f"{', '.join(parts)}: {verdict} the bound of {self.bound:g}"
