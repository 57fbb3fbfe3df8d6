"""The newest of what was decided, in bounded memory. Pure."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Remembered"]

REMEMBERED = 100_000
"""Decided interactions and episodes whose late feedback is told apart from feedback on unknown ones."""


class Remembered(OrderedDict[str, str]):
    """Names and reasons; the oldest ones go."""

    def __setitem__(self, name: str, reason: str) -> None:
        super().__setitem__(name, reason)
        if len(self) > REMEMBERED:
            self.popitem(last=False)
