"""What was decided: all that the ledger names, and the newest of the rest in bounded memory. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

__all__ = ["Remembered"]

REMEMBERED = 100_000
"""Decided interactions and episodes whose late feedback is told apart from feedback on unknown ones."""


class Remembered:
    """Names and reasons; the oldest ones go, but none that is kept."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._newest: OrderedDict[str, str] = OrderedDict()

    def keep(self, names: Iterable[str], reason: str) -> None:
        """These stay: what the ledger names must never be decided again, however much a new leader reads."""
        self._kept.update(dict.fromkeys(names, reason))

    def keep_all(self, reasons: Mapping[str, str]) -> None:
        """As ``keep``, each with a reason of its own."""
        self._kept.update(reasons)

    def get(self, name: str) -> str | None:
        """Why it was decided so; None where it is not known to be decided."""
        return self._kept.get(name, self._newest.get(name))

    def __contains__(self, name: str) -> bool:
        return name in self._kept or name in self._newest

    def __getitem__(self, name: str) -> str:
        return self._kept[name] if name in self._kept else self._newest[name]

    def __setitem__(self, name: str, reason: str) -> None:
        self._newest[name] = reason
        if len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)

    def update(self, reasons: Mapping[str, str]) -> None:
        """Remember all of these."""
        for name, reason in reasons.items():
            self[name] = reason

    def forget(self, name: str) -> None:
        """It is undecided again; what is kept stays."""
        self._newest.pop(name, None)
