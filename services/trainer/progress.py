"""Position of a job's training on this trainer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(slots=True)
class Progress:
    """Current policy version and batch of a trainer. Changes only at step boundaries.

    Attributes:
        version: policy version of the weights; -1 before the first.
        batch: number of the last trained batch.
        digest: digest of the published weights.
    """

    version: int = -1
    batch: int = 0
    digest: str = ""
