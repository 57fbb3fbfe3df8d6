"""Keys and values of sequences that go on later: kept until their next request, other weights, or want of room.

Shape legend: K = key/value heads, L = positions, d = head width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["HeldSequence", "HeldSequences"]


@dataclass(frozen=True, slots=True, eq=False)
class HeldSequence:
    """The computed prefix ``token_ids`` [L]: keys and values [K, L, d] of each layer."""

    token_ids: list[int]
    keys: list[Tensor]
    values: list[Tensor]


class HeldSequences:
    """At most ``limit`` of them, by session; the oldest makes room for a new one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, HeldSequence] = OrderedDict()

    def keep(self, session: str, sequence: HeldSequence) -> None:
        """Keep a sequence for the next request of its session."""
        self._held[session] = sequence
        self._held.move_to_end(session)
        if len(self._held) > self._limit:
            self._held.popitem(last=False)

    def take(self, session: str, prompt_ids: Sequence[int]) -> HeldSequence | None:
        """The held prefix of the session, where ``prompt_ids`` goes on from it; it is held no longer."""
        found = self._held.pop(session, None)
        if found is None or len(found.token_ids) >= len(prompt_ids):
            return None
        return found if list(prompt_ids[: len(found.token_ids)]) == found.token_ids else None

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()
