"""What a decision means for the feedback behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.services.coordinator.ledger import LedgerState
from penstock.shared.protocol.events import Admission, Admitted, BatchTrained, Dropped, Event, LineageForked
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.interaction import Fate, FateStatus

__all__ = ["fate", "fates_of"]


def fate(
    feedback: str, status: FateStatus, reason: str, time: float, interactions: Sequence[str] = (), *,
    ordinal: int = -1, batch: int = 0, version: int = 0,
) -> Fate:  # fmt: skip
    """One fate."""
    return Fate(
        feedback=feedback, status=status, reason=reason, interactions=list(interactions), ordinal=ordinal, batch=batch,
        version=version, time=time,
    )  # fmt: skip


def fates_of(events: Iterable[Event], state: LedgerState) -> list[Fate]:
    """What committed events mean for feedback; ``state`` is the ledger after them."""
    found: list[Fate] = []
    for event in events:
        match event:
            case Admitted():
                ordinals = [admission.ordinal for admission in event.admissions]
                found += _of(ordinals, state, "admitted", "", event.time)
            case Dropped() if not event.redraw:
                found += _of(_ordinals(event.draws), state, "rejected", event.reason, event.time)
            case BatchTrained():
                draws = state.batches[event.number].draws if event.number in state.batches else ()
                found += _of(
                    _ordinals(draws), state, "trained", "", event.time, batch=event.number, version=event.version
                )
            case LineageForked() if not event.redraw:
                found += _of(_ordinals(event.draws), state, "rejected", "rolled_back", event.time)
            case LineageForked():
                again = sorted(draw.ordinal for draw in state.open if draw.n)
                found += _of(again, state, "admitted", "rolled_back", event.time)
            case _:
                pass
    return found


def _ordinals(draws: Iterable[Draw]) -> list[int]:
    return [draw.ordinal for draw in draws]


def _of(
    ordinals: Iterable[int], state: LedgerState, status: FateStatus, reason: str, time: float, *, batch: int = 0,
    version: int = 0,
) -> list[Fate]:  # fmt: skip
    return [
        fate(
            name, status, reason or _rule(admission), time, [*admission.interactions, *admission.context],
            ordinal=ordinal, batch=batch, version=version,
        )
        for ordinal in ordinals
        if (admission := state.admissions.get(ordinal)) is not None
        for name in admission.feedback
    ]  # fmt: skip


def _rule(admission: Admission) -> str:
    """By which rule it was admitted, and to which loss where that is not the policy's."""
    return admission.reason if admission.objective == "policy" else f"{admission.objective}: {admission.reason}"
