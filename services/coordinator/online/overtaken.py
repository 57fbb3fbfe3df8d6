"""Retractions that were read before what they take back. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.shared.protocol.interaction import Feedback

__all__ = ["Overtaken"]


class Overtaken:
    """They wait as long as other feedback on what nobody knows, and keep the low-water mark no longer than that."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, Feedback]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    @property
    def seqs(self) -> Iterator[int]:
        """Where they stand in FEEDBACK."""
        return (seq for seq, _ in self._waiting.values())

    def put(self, name: str, seq: int, retraction: Feedback) -> None:
        """Item ``name`` is to be taken back once it is read."""
        self._waiting[name] = (seq, retraction)

    def pop(self, name: str) -> str:
        """The item was read: the id of its retraction, which waits no longer."""
        return self._waiting.pop(name)[1].id

    def expire(self, limit: float) -> list[str]:
        """Ids of those received before ``limit``: what they take back never came."""
        late = [name for name, (_, retraction) in self._waiting.items() if retraction.received < limit]
        return [self.pop(name) for name in late]
