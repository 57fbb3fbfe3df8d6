"""What a decision means for the feedback and the interactions behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.refusals import refused
from penstock.shared.protocol.events import Admission, Admitted, BatchTrained, Dropped, Event, LineageForked
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.interaction import Fate, FateStatus, InteractionFate

__all__ = ["fate", "fates_of", "interaction_fates_of"]


def fate(
    feedback: str, status: FateStatus, reason: str, time: float, interactions: Sequence[str] = (), *,
    ordinal: int = -1, batch: int = 0, version: int = 0, revision: int = 0,
) -> Fate:  # fmt: skip
    """One fate."""
    return Fate(
        feedback=feedback, status=status, reason=reason, interactions=list(interactions), ordinal=ordinal, batch=batch,
        version=version, time=time, revision=revision,
    )  # fmt: skip


def fates_of(events: Iterable[Event], state: LedgerState) -> list[Fate]:
    """What committed events mean for feedback; ``state`` is the ledger after them."""
    return [
        fate(
            name, end.status, end.reason or _rule(admission), end.time,
            [*admission.interactions, *admission.context],
            ordinal=admission.ordinal, batch=end.batch, version=end.version,
        )
        for admission, end in _ends_of(events, state)
        for name in admission.feedback
    ]  # fmt: skip


def interaction_fates_of(events: Iterable[Event], state: LedgerState) -> list[InteractionFate]:
    """What committed events mean for interactions."""
    admissions = (one for event in events if isinstance(event, Admitted) for one in event.admissions)
    left = [fate for one in admissions for fate in refused(one.refused, one.time)]
    return left + [
        InteractionFate(
            interaction=name, status=end.status, reason=end.reason or _rule(admission), ordinal=admission.ordinal,
            batch=end.batch, version=end.version, time=end.time,
        )
        for admission, end in _ends_of(events, state)
        for name in admission.interactions
    ]  # fmt: skip


class _End(NamedTuple):
    """What an event means for draws."""

    ordinals: Sequence[int]
    status: Literal["admitted", "rejected", "trained"]
    reason: str
    time: float
    batch: int = 0
    version: int = 0


def _ends_of(events: Iterable[Event], state: LedgerState) -> Iterator[tuple[Admission, _End]]:
    for event in events:
        end = _end_of(event, state)
        for ordinal in end.ordinals if end is not None else ():
            if end is not None and (admission := state.admissions.get(ordinal)) is not None:
                yield admission, end


def _end_of(event: Event, state: LedgerState) -> _End | None:
    match event:
        case Admitted():
            return _End([admission.ordinal for admission in event.admissions], "admitted", "", event.time)
        case Dropped() if not event.redraw:
            return _End(_ordinals(event.draws), "rejected", event.reason, event.time)
        case BatchTrained():
            draws = state.batches[event.number].draws if event.number in state.batches else ()
            return _End(_ordinals(draws), "trained", "", event.time, event.number, event.version)
        case LineageForked() if not event.redraw:
            return _End(_ordinals(event.draws), "rejected", "rolled_back", event.time)
        case LineageForked():
            again = sorted(draw.ordinal for draw in state.open if draw.n)
            return _End(again, "admitted", "rolled_back", event.time)
        case _:
            return None


def _ordinals(draws: Iterable[Draw]) -> list[int]:
    return [draw.ordinal for draw in draws]


def _rule(admission: Admission) -> str:
    """By which rule it was admitted, and to which loss where that is not the policy's."""
    return admission.reason if admission.objective == "policy" else f"{admission.objective}: {admission.reason}"
