"""Draws and batches in the state of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from penstock.shared.protocol.ids import Draw

__all__ = ["OpenDraw", "TrainedBatch"]


class OpenDraw(msgspec.Struct, frozen=True, gc=False):
    """A draw that is not terminal. ``batch`` is the number of the sealed batch that holds it, 0 while in flight.

    ``temperature`` is that of the settings when it was drawn; its ticket asks for it. ``after``: its group has a higher
    sequence in EXPERIENCE than this one.
    """

    min_version: int
    deadline: float
    batch: int = 0
    temperature: float | None = None
    after: int = 0

    def sealed_in(self, batch: int) -> OpenDraw:
        """Return the draw held by ``batch``; 0 puts it in flight again."""
        return OpenDraw(self.min_version, self.deadline, batch, self.temperature, self.after)


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A batch of the present lineage whose groups may still be needed (replay, restart)."""

    draws: tuple[Draw, ...]
    seqs: tuple[int, ...]
    revision: int
    version: int
    digest: str
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tracked values before the batch."""
    sizes: tuple[int, ...] = ()
    """Bytes of the payload of each group; () if the ledger does not have them."""
