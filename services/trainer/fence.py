"""Fencing of coordinators: the trainer obeys only the newest coordinator epoch that it has seen."""

from __future__ import annotations

__all__ = ["Fence"]


class Fence:
    """Tracks the highest coordinator epoch seen. Messages with a lower epoch come from a leader that lost its lease."""

    def __init__(self) -> None:
        self.epoch = 0

    def lets_in(self, epoch: int) -> bool:
        """Return True if ``epoch`` is not below the highest epoch seen. All lower epochs are refused from then on."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return True
