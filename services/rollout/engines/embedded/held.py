"""Keys and values of session prefixes, held until the next request of the session, a weight update or eviction.

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
    """Computed prefix ``token_ids`` [L] with its keys and values [K, L, d] per layer."""

    token_ids: list[int]
    keys: list[Tensor]
    values: list[Tensor]


class HeldSequences:
    """Holds at most ``limit`` prefixes, one per session; evicts the oldest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, HeldSequence] = OrderedDict()

    def keep(self, session: str, sequence: HeldSequence) -> None:
        """Hold a prefix for the next request of its session; replaces an earlier one of the session."""
        self._held[session] = sequence
        self._held.move_to_end(session)
        if len(self._held) > self._limit:
            self._held.popitem(last=False)

    def take(self, session: str, prompt_ids: Sequence[int]) -> HeldSequence | None:
        """Remove the prefix of the session and return it; None if absent or if ``prompt_ids`` does not extend it."""
        found = self._held.pop(session, None)
        if found is None or len(found.token_ids) >= len(prompt_ids):
            return None
        return found if list(prompt_ids[: len(found.token_ids)]) == found.token_ids else None

    def clear(self) -> None:
        """Drop all prefixes."""
        self._held.clear()
