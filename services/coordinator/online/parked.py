"""Feedback whose target is not known yet. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from penstock.services.coordinator.online.credit import Item

__all__ = ["MAX_PARKED", "MAX_PER_KEY", "Parked"]

MAX_PER_KEY = 50_000
"""Items that one API key may have waiting; beyond that its oldest ones go."""
MAX_PARKED = 1_000_000
"""Items that all keys together may have waiting; beyond that the oldest ones of the key with the most go."""
AT_ONCE = 1_000
"""Items that go at once where all keys together have too many."""


class Parked:
    """Items by target, bounded for each key that posts and for all: nobody fills memory with feedback on what never
    comes. An item takes about 1 KB of memory, with what ``Matching`` holds of it.
    """

    def __init__(self) -> None:
        self._targets: dict[str, Item | dict[str, Item]] = {}
        """Most targets have one item."""
        self._keys: dict[str, OrderedDict[str, Item]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._keys.values() for item in items.values())

    def put(self, target: str, item: Item) -> list[Item]:
        """Keep an item; those that go for it, which their owner must ``remove``: the oldest one of its key, or of all.

        An item that waits already stays where it is among those of its key.
        """
        name, mine = item.feedback.id, self._keys.setdefault(item.feedback.key_id, OrderedDict())
        known = self._targets.get(target)
        if known is None or (isinstance(known, Item) and known.feedback.id == name):
            self._targets[target] = item
        elif isinstance(known, Item):
            self._targets[target] = {known.feedback.id: known, name: item}
        else:
            known[name] = item
        self._count += name not in mine
        mine[name] = item
        if len(mine) > MAX_PER_KEY:
            return [next(iter(mine.values()))]
        if self._count > MAX_PARKED:
            heaviest = max(self._keys.values(), key=len)
            return list(islice(heaviest.values(), AT_ONCE))
        return []

    def remove(self, target: str, name: str) -> None:
        """One item waits no longer."""
        items = self._targets.get(target)
        if isinstance(items, Item):
            if items.feedback.id == name:
                del self._targets[target]
                self._unlist(items)
        elif items is not None and (item := items.pop(name, None)) is not None:
            self._unlist(item)
            if not items:
                del self._targets[target]

    def pop(self, target: str) -> dict[str, Item]:
        """What waited for a target, by id."""
        found = self._targets.pop(target, {})
        items = {found.feedback.id: found} if isinstance(found, Item) else found
        for item in items.values():
            self._unlist(item)
        return items

    def _unlist(self, item: Item) -> None:
        mine = self._keys.get(item.feedback.key_id)
        if mine is not None:
            self._count -= mine.pop(item.feedback.id, None) is not None
            if not mine:
                del self._keys[item.feedback.key_id]
