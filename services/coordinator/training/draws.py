"""Draws and batches, as stored in the ledger's state. A draw is an attempt to get one group to train on: trajectories
of the same prompt or environment seed, or one piece of admitted live data."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from penstock.shared.protocol.ids import Draw

__all__ = ["OpenDraw", "TrainedBatch"]


class OpenDraw(msgspec.Struct, frozen=True, gc=False):
    """A draw that has not ended: it is in flight, or its group belongs to a sealed batch that is not trained yet.
    ``batch`` is the number of that batch, or 0 while the draw is in flight.

    ``temperature`` is the sampling temperature set when it was drawn, which its ticket requests. The group of the draw
    has a stream sequence number above ``after`` in EXPERIENCE.
    """

    min_version: int
    deadline: float
    batch: int = 0
    temperature: float | None = None
    after: int = 0

    def sealed_in(self, batch: int) -> OpenDraw:
        """Return a copy of this draw, assigned to the sealed batch number ``batch``; 0: the copy is in flight again."""
        return OpenDraw(self.min_version, self.deadline, batch, self.temperature, self.after)


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A batch of the current lineage whose groups may still be needed (replay, restart)."""

    draws: tuple[Draw, ...]
    seqs: tuple[int, ...]
    revision: int
    version: int
    digest: str
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tracked rewards by kind of prompt, as they were before the batch was trained."""
    sizes: tuple[int, ...] = ()
    """Payload bytes of each group; () if the ledger does not record them."""
