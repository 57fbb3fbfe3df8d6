"""How far a job has come on this trainer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(slots=True)
class Progress:
    """Changes at step boundaries only.

    Attributes:
        version: policy version of the weights; -1 before there are any.
        batch: last batch that was trained.
        digest: of the published weights.
    """

    version: int = -1
    batch: int = 0
    digest: str = ""
