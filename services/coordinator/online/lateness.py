"""What came to an episode after it was over by time: follows from the facts, whoever reads them and when. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.services.coordinator.online.credit import Item, Turn
from penstock.shared.config.online_job import OnlineJob

__all__ = ["first_late", "said_before", "turns_before"]


def first_late(turns: Sequence[Turn], items: Mapping[str, Item], job: OnlineJob) -> float | None:
    """When the first turn or word came to an episode that was idle for too long by then, or too old; None: none did.

    A turn is there once it is answered, and a word that is revised was there before.

    Args:
        turns: at least one.
        items: what was said of the whole.
    """
    first, *later = sorted((turn.interaction for turn in turns), key=lambda one: one.ended)
    facts = [(one.ended, one.started) for one in later]
    facts += [(_came(item), math.inf) for item in items.values()]
    facts += [(_came(item), math.inf) for turn in turns for item in turn.items.values()]
    active, begun = first.ended, first.started
    for came, started in sorted(facts):
        if came - active >= job.online.idle_ttl_s or came - begun >= job.online.max_age_s:
            return came
        if started < math.inf:
            active, begun = max(active, came), min(begun, started)
    return None


def turns_before(turns: Sequence[Turn], time: float) -> list[Turn]:
    """Those that were there before a time, with what was said of them by then."""
    return [
        Turn(turn.seq, turn.interaction, said_before(turn.items, time), turn.refusal)
        for turn in turns
        if turn.interaction.ended < time
    ]


def said_before(items: Mapping[str, Item], time: float) -> dict[str, Item]:
    """What was said before a time."""
    return {name: item for name, item in items.items() if _came(item) < time}


def _came(item: Item) -> float:
    return -math.inf if item.feedback.revision else item.feedback.received
