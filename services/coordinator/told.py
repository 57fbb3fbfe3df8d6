"""Feedback behind each batch of a job: which answers were trained, and by which items. From the ledger alone; pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event, SealedGroup

__all__ = ["told_by_batch"]


def told_by_batch(events: Iterable[Event]) -> dict[int, list[dict[str, Any]]]:
    """Batch -> a row for each of its groups that live answers made, in the batch's order; the newest revision counts.

    A row has the ``draw``, its ``objective``, ``reward``, the ``reason`` for that (`feedback`, `default`, …), its
    ``lag``, ids of ``interactions`` in turn, of what it only refers to (``context``) and of the ``feedback``.
    """
    admissions: dict[int, Admission] = {}
    told: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        match event:
            case Admitted():
                admissions |= {one.ordinal: one for one in event.admissions}
            case BatchSealed():
                told[event.number] = [
                    _row(group, admissions[group.draw.ordinal])
                    for group in event.groups
                    if group.draw.ordinal in admissions
                ]
            case _:
                pass
    return told


def _row(group: SealedGroup, admission: Admission) -> dict[str, Any]:
    return {
        "draw": str(group.draw),
        "objective": admission.objective,
        "reward": admission.reward,
        "reason": admission.reason,
        "lag": admission.lag,
        "interactions": list(admission.interactions),
        "context": list(admission.context),
        "feedback": list(admission.feedback),
    }
