"""Which gateways are still there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["MAX_SILENT", "Presence"]

MAX_SILENT = 6
"""A gateway that was not heard of at so many looks in a row is gone, and the clients behind it with it."""


class Presence:
    """Counts looks without a sign. Looks, not seconds: who was stalled itself has not listened either."""

    def __init__(self) -> None:
        self._silent: Counter[str] = Counter()

    def seen(self, gateway: str) -> None:
        """A sign of life."""
        del self._silent[gateway]

    def look(self, busy: Iterable[str]) -> set[str]:
        """Count one more look for each gateway that has requests here; those that are gone."""
        busy = set(busy)
        self._silent = Counter({gateway: self._silent[gateway] + 1 for gateway in busy})
        return {gateway for gateway, looks in self._silent.items() if looks > MAX_SILENT}
