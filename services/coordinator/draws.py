"""Draws and batches as the ledger's state holds them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.shared.protocol.ids import Draw

__all__ = ["OpenDraw", "TrainedBatch"]


@dataclass(slots=True)
class OpenDraw:
    """A draw that is not terminal. ``batch`` is the number of the sealed batch that holds it, 0 while in flight.

    ``temperature`` is that of the settings when it was drawn, whatever they are by now: its ticket asks for it.
    """

    min_version: int
    deadline: float
    batch: int = 0
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A batch of the present lineage whose groups may still be needed (replay, restart)."""

    draws: tuple[Draw, ...]
    seqs: tuple[int, ...]
    revision: int
    version: int
    digest: str
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What was tracked before it."""
