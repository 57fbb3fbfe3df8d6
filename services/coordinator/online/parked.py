"""Feedback whose target is not known yet. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from penstock.services.coordinator.online.credit import Item

__all__ = ["MAX_PER_KEY", "Parked"]

MAX_PER_KEY = 50_000
"""Items that one API key may have waiting; beyond that its oldest ones go."""


class Parked:
    """Items by target, bounded for each key that posts: nobody fills memory with feedback on what never comes."""

    def __init__(self) -> None:
        self._targets: dict[str, dict[str, Item]] = {}
        self._keys: dict[str, OrderedDict[str, Item]] = {}

    def __len__(self) -> int:
        return sum(len(items) for items in self._keys.values())

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._keys.values() for item in items.values())

    def put(self, target: str, item: Item) -> Item | None:
        """Keep an item; the oldest one of its key where that has too many now, which its owner must ``remove``."""
        name, mine = item.feedback.id, self._keys.setdefault(item.feedback.key_id, OrderedDict())
        self._targets.setdefault(target, {})[name] = item
        mine[name] = item
        return next(iter(mine.values())) if len(mine) > MAX_PER_KEY else None

    def remove(self, target: str, name: str) -> None:
        """One item waits no longer."""
        items = self._targets.get(target, {})
        if (item := items.pop(name, None)) is not None:
            self._unlist(item)
        if not items:
            self._targets.pop(target, None)

    def pop(self, target: str) -> dict[str, Item]:
        """What waited for a target, by id."""
        items = self._targets.pop(target, {})
        for item in items.values():
            self._unlist(item)
        return items

    def _unlist(self, item: Item) -> None:
        mine = self._keys.get(item.feedback.key_id)
        if mine is not None:
            mine.pop(item.feedback.id, None)
            if not mine:
                del self._keys[item.feedback.key_id]
