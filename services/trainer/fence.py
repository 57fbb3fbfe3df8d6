"""Which coordinator a trainer listens to: the newest one that it heard of."""

from __future__ import annotations

__all__ = ["Fence"]


class Fence:
    """The highest coordinator epoch that was seen; what has a lower one comes from a leader that lost its lease."""

    def __init__(self) -> None:
        self.epoch = 0

    def lets_in(self, epoch: int) -> bool:
        """True if a message of a coordinator with this epoch counts; from then on none of a lower one does."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return True
