"""What earlier leaders told of feedback and interactions, and another one must not decide anew. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.services.coordinator.online.episode import CUT
from penstock.shared.protocol.interaction import Fate, InteractionFate

__all__ = ["NOTHING", "Told"]

HELD = "quarantine_"
"""What the reasons begin with for which the quarantine rejects what it held."""
MAX_TOLD = 500_000
"""Items, and interactions, that are recalled: the newest ones."""
LAST = frozenset({"rejected", "expired"})
"""Fates after which an item counts for nothing. A retraction is read again: what it takes back may still come."""


@dataclass(frozen=True, slots=True)
class Told:
    """What gave way because a stream or a waiting room was full follows from no fact that a new leader could read.

    Attributes:
        over: posted episodes that are decided, see ``FateBatch.over``.
        feedback: items that are rejected or expired, and which of these.
        interactions: those that are never trained on, with the reason.
        let_go: items that the quarantine rejected, and when; their senders may have revised them since.
    """

    over: Sequence[tuple[str, str]] = ()
    feedback: Mapping[str, str] = field(default_factory=dict)
    interactions: Mapping[str, str] = field(default_factory=dict)
    let_go: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        fates: Iterable[Fate],
        interactions: Iterable[InteractionFate] = (),
        over: Iterable[tuple[str, str]] = (),
    ) -> Told:
        """What stands after these, in their order. Where they have an ordinal the ledger knows it, too."""
        newest = {fate.feedback: fate for fate in fates if not fate.revision}  # else it is about a late one alone
        last = [fate for fate in newest.values() if fate.status in LAST and fate.ordinal < 0]
        first: dict[str, str] = {}
        for one in interactions:
            if one.status == "rejected" and one.ordinal < 0:
                first.setdefault(one.interaction, one.reason)
        return cls(
            over=list(over),
            feedback=_newest((fate.feedback, fate.status) for fate in last if not fate.reason.startswith(HELD)),
            # What was broken off may be completed.
            interactions=_newest((name, reason) for name, reason in first.items() if reason != CUT),
            let_go={fate.feedback: fate.time for fate in last if fate.reason.startswith(HELD)},
        )


def _newest(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    return dict(list(found)[-MAX_TOLD:])


NOTHING = Told()
