"""Which messages of DECISIONS are of a leader that was gone already: another one had spoken before them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Leaders"]


class Leaders:
    """The newest epoch of each job, of the messages that were read in their order."""

    def __init__(self, epochs: Mapping[str, int] | None = None) -> None:
        self.epochs = dict(epochs or {})

    def is_gone(self, job: str, epoch: int) -> bool:
        """True if a later leader has spoken before this message; 0 is nobody's epoch."""
        newest = self.epochs.get(job, 0)
        if 0 < epoch < newest:
            return True
        self.epochs[job] = max(epoch, newest)
        return False
