"""What an audit checks of an online job: every trained trajectory was admitted, and nothing counted twice. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event

__all__ = ["flaws_of_admission"]


def flaws_of_admission(
    entries: Sequence[Sequence[Event]], trained: Mapping[int, BatchSealed], max_lag: int
) -> tuple[int, list[str]]:
    """``(admissions, flaws)`` of the ledger of an online job; ``trained`` are the batches of its lineage.

    An interaction is admitted once and with one ordinal for good; an item of feedback counts once; a trained group has
    the reward of its admission, which was within the lag bound when it was made.
    """
    events = [event for entry in entries for event in entry]
    admissions = [one for event in events if isinstance(event, Admitted) for one in event.admissions]
    flaws = [
        f"ordinal {one.ordinal}: admitted with lag {one.lag} > {max_lag}" for one in admissions if one.lag > max_lag
    ]
    flaws += [f"ordinal {one.ordinal}: no interaction" for one in admissions if not one.interactions]
    flaws += _twice("interaction", (name for one in admissions for name in one.interactions))
    flaws += _twice("feedback", (name for one in admissions for name in one.feedback))
    return len(admissions), flaws + _unlike(trained, {one.ordinal: one for one in admissions})


def _twice(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what} {name} was admitted {count} times" for name, count in Counter(names).items() if count > 1]


def _unlike(trained: Mapping[int, BatchSealed], admissions: Mapping[int, Admission]) -> list[str]:
    flaws = []
    for number, batch in trained.items():
        for group in batch.groups:
            admission = admissions.get(group.draw.ordinal)
            if admission is None:
                flaws.append(f"batch {number}: draw {group.draw} was trained without an admission")
            elif any(abs(reward - admission.reward) > 1e-4 * max(1.0, abs(reward)) for reward in group.rewards):
                flaws.append(f"batch {number}: draw {group.draw} has reward {group.rewards}, not {admission.reward:g}")
    return flaws
