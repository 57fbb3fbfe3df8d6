"""Fields of every ledger event."""

from __future__ import annotations

import msgspec

__all__ = ["Event"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: who wrote it (monotone leader epoch) and when (Unix seconds, for people and deadlines)."""

    writer_epoch: int
    time: float
