"""Common fields of all ledger events."""

from __future__ import annotations

import msgspec

__all__ = ["Event"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of events. ``writer_epoch`` is the epoch of the leader that wrote the event, and never decreases. ``time``
    is in Unix seconds, for display and deadlines."""

    writer_epoch: int
    time: float
