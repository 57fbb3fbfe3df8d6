"""Interactions that are never trained on, and why: collected where it is decided, told in DECISIONS. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.services.coordinator.online.credit import Turn
from penstock.services.coordinator.online.names import canonical
from penstock.shared.protocol.interaction import InteractionFate

__all__ = ["Refusals", "reasons_of", "refused"]


class Refusals:
    """What was refused since somebody asked; what is refused with an admission stands in that."""

    def __init__(self) -> None:
        self._found: list[InteractionFate] = []

    def add(self, reasons: Mapping[str, str], time: float) -> None:
        """These interactions (canonical ids) are refused."""
        self._found += refused(reasons, time)

    def drain(self) -> list[InteractionFate]:
        """All of them, once."""
        found, self._found = self._found, []
        return found


def refused(reasons: Mapping[str, str], time: float) -> list[InteractionFate]:
    """The fates of interactions that are never trained on."""
    return [
        InteractionFate(interaction=name, status="rejected", reason=reason, time=time)
        for name, reason in reasons.items()
    ]


def reasons_of(turns: Iterable[Turn], reason: str) -> dict[str, str]:
    """One reason for all of these."""
    return {canonical(turn.interaction.id): reason for turn in turns}
