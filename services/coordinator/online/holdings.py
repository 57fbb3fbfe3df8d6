"""How much of what waits is whose: nobody fills memory, or a stream that keeps what is undecided, for all. Pure."""

from __future__ import annotations

from itertools import islice

__all__ = ["Holdings"]

MAX_PER_KEY = 10_000
"""Items of one API key; beyond that its oldest ones go."""
MAX_BYTES = 1 << 30
"""Size of the stream, until somebody has asked for it."""
SHARE_OF_KEY, SHARE_OF_ALL = 1 / 8, 1 / 2
"""Of the stream: what one key, and all keys together, may have undecided there."""


class Holdings:
    """Names of items by the API key that posted them, the oldest first, with the bytes of each.

    Attributes:
        max_bytes: of the stream that they lie in.
    """

    def __init__(self) -> None:
        self.max_bytes = MAX_BYTES
        self._keys: dict[str, dict[str, int]] = {}
        self._owners: dict[str, str] = {}
        self._nbytes: dict[str, int] = {}
        self.nbytes = 0
        """Of all."""

    def add(self, key_id: str, name: str, nbytes: int) -> None:
        """An item waits."""
        self.remove(name)
        self._keys.setdefault(key_id, {})[name] = nbytes
        self._owners[name] = key_id
        self._nbytes[key_id] = self._nbytes.get(key_id, 0) + nbytes
        self.nbytes += nbytes

    def remove(self, name: str) -> None:
        """An item waits no longer, if it did."""
        key_id = self._owners.pop(name, None)
        if key_id is None:
            return
        nbytes = self._keys[key_id].pop(name)
        self._nbytes[key_id] -= nbytes
        self.nbytes -= nbytes
        if not self._keys[key_id]:
            del self._keys[key_id], self._nbytes[key_id]

    def move(self, name: str) -> None:
        """An item that waits lies behind all others now."""
        items = self._keys[self._owners[name]]
        items[name] = items.pop(name)

    def excess(self, key_id: str) -> list[str]:
        """What goes now that a key has posted: its oldest items, and those of whoever has the most where all are full.

        The newest one of a key stays, however large it is.
        """
        mine = self._keys.get(key_id, {})
        found = _oldest(mine, len(mine) - MAX_PER_KEY, self._nbytes.get(key_id, 0) - SHARE_OF_KEY * self.max_bytes)
        left = self.nbytes - sum(mine[name] for name in found) - SHARE_OF_ALL * self.max_bytes
        if left > 0:
            heaviest = self._keys[self._heaviest()]
            found += [name for name in _oldest(heaviest, 0, left) if name not in found]
        return found

    def older_half(self) -> list[str]:
        """The older half of what the key with the most bytes has."""
        heaviest = self._keys[self._heaviest()] if self._keys else {}
        return list(heaviest)[: (len(heaviest) + 1) // 2]

    def _heaviest(self) -> str:
        return max(self._nbytes, key=lambda key_id: self._nbytes[key_id])


def _oldest(items: dict[str, int], count: int, nbytes: float) -> list[str]:
    """The oldest of ``items`` that are so many and have so many bytes, without the newest one."""
    found: list[str] = []
    for name, size in islice(items.items(), max(0, len(items) - 1)):
        if count <= 0 and nbytes <= 0:
            break
        found.append(name)
        count, nbytes = count - 1, nbytes - size
    return found
