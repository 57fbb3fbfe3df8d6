"""Retractions that were read before what they take back. Pure."""

from __future__ import annotations

from collections import OrderedDict

from penstock.services.coordinator.online.marks import Marks
from penstock.shared.protocol.interaction import Feedback

__all__ = ["MAX_WAITING", "Overtaken"]

MAX_WAITING = 100_000
"""Retractions that wait; beyond that the oldest one goes."""


class Overtaken:
    """They wait as long as other feedback on what nobody knows, and keep the low-water mark no longer than that."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, tuple[int, Feedback]] = OrderedDict()
        self._seqs = Marks(lambda seq, name: name in self._waiting and self._waiting[name][0] == seq)
        self._times = Marks(lambda time, name: name in self._waiting and self._waiting[name][1].received == time)

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    @property
    def lowest(self) -> int | None:
        """Where the first one stands in FEEDBACK."""
        found = self._seqs.lowest()
        return None if found is None else int(found)

    def put(self, name: str, seq: int, retraction: Feedback) -> str:
        """Item ``name`` is to be taken back once it is read; the id of the retraction that goes for it, or ''."""
        self._waiting[name] = (seq, retraction)
        self._seqs.put(seq, name)
        self._times.put(retraction.received, name)
        return self.pop(next(iter(self._waiting))) if len(self._waiting) > MAX_WAITING else ""

    def pop(self, name: str) -> str:
        """The item was read: the id of its retraction, which waits no longer."""
        return self._waiting.pop(name)[1].id

    def expire(self, limit: float) -> list[str]:
        """Ids of those received before ``limit``: what they take back never came."""
        return [self.pop(name) for name in self._times.pop_until(limit, inclusive=False)]
