"""What earlier leaders told of feedback and interactions, and another one must not decide anew. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.services.coordinator.online.episode import CUT
from penstock.shared.protocol.interaction import Fate, InteractionFate

__all__ = ["ADMITTED", "NOTHING", "Told"]

ADMITTED = "admitted"

HELD = "quarantine_"
"""What the reasons begin with for which the quarantine rejects what it held."""
BY = "by "
"""What the reason of an item begins with that is taken back; its retraction follows."""
MAX_TOLD = 500_000
"""Items, and interactions, that are recalled: the newest ones."""
LAST = frozenset({"rejected", "expired"})
"""Fates after which an item counts for nothing. A retraction is read again: what it takes back may still come."""
COUNTED = frozenset({ADMITTED, "trained"})


@dataclass(frozen=True, slots=True)
class Told:
    """What gave way because a stream or a waiting room was full follows from no fact that a new leader could read.

    Attributes:
        over: posted episodes that are decided, see ``FateBatch.over``.
        feedback: items that are rejected, expired, taken back or admitted, and which of these.
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
        """What stands after these, in their order. What was admitted the ledger names only for a while."""
        newest, late = dict[str, Fate](), set[str]()
        for fate in fates:
            if fate.revision:  # it is about a late one alone
                late.add(fate.feedback)
            else:
                newest[fate.feedback] = fate
        ends = dict.fromkeys((name for name in late if name not in newest), ADMITTED)
        for fate in newest.values():
            ends |= _ends_by(fate)
        first: dict[str, str] = {}
        for one in interactions:
            if one.status == "rejected" and one.ordinal < 0 and one.reason != CUT:  # that may be completed
                first.setdefault(one.interaction, one.reason)
        return cls(
            over=list(over),
            feedback=_newest(ends.items()),
            interactions=_newest(first.items()),
            let_go={name: fate.time for name, fate in newest.items() if _is_let_go(fate)},
        )


def _is_let_go(fate: Fate) -> bool:
    return fate.status in LAST and fate.ordinal < 0 and fate.reason.startswith(HELD)


def _ends_by(fate: Fate) -> dict[str, str]:
    """What has its end by the newest fate of an item."""
    if fate.ordinal >= 0 or fate.status in COUNTED:
        return {fate.feedback: ADMITTED}
    if fate.status in LAST and not _is_let_go(fate):
        return {fate.feedback: fate.status}
    if fate.status == "retracted" and fate.reason.startswith(BY):  # both or neither: it has met what takes it back
        return {fate.feedback: fate.status, fate.reason.removeprefix(BY): fate.status}
    return {}


def _newest(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    return dict(list(found)[-MAX_TOLD:])


NOTHING = Told()
