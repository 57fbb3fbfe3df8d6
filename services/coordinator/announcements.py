"""Reports decisions of a job to users as rows of EVENTS."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.services.coordinator.ledger import NO_SIGNAL
from penstock.services.coordinator.outbox import Outbox
from penstock.shared.protocol.events import (
    BatchTrained,
    BestCheckpoint,
    CanaryBegun,
    Checkpointed,
    Dropped,
    Event,
    LineageForked,
    Promoted,
    PromotionRefused,
    Quarantined,
    SettingsChanged,
)

__all__ = ["announce"]


def announce(outbox: Outbox, events: Iterable[Event]) -> None:
    """Report the decisions that matter to users."""
    for event in events:
        match event:
            case Checkpointed():
                why = f" ({event.reason})" if event.reason else ""
                text = f"checkpoint after update {event.number}{why} at {event.path}"
                outbox.event("info", "checkpoint", text, number=event.number, reason=event.reason)
            case BestCheckpoint():
                text = f"checkpoint {event.number} is the best: {event.metric} {event.value:.4g} after {event.step}"
                outbox.event("info", "best", text, number=event.number, value=event.value)
            case Dropped() if event.reason not in ("run_ended", "cancelled", NO_SIGNAL):
                ending = "" if event.redraw else " for good"
                outbox.event("warning", "dropped", f"{len(event.draws)} draws dropped{ending}: {event.reason}")
            case LineageForked():
                outbox.event("warning", "lineage_forked", f"rolled back from batch {event.from_batch}: {event.reason}")
            case Promoted() | PromotionRefused() | CanaryBegun() | Quarantined():
                _announce_safety(outbox, event)
            case SettingsChanged():
                shown = ", ".join(
                    f"{key} {value}" for key, value in sorted(event.settings.items()) if value is not None
                )
                text = f"from update {event.update_index + 1} on: {shown}"
                outbox.event("info", "settings", text, step=event.update_index + 1, settings=event.settings)
            case BatchTrained() if event.number == 1:
                outbox.event("info", "step", "first policy update done")
            case _:
                pass


def _announce_safety(outbox: Outbox, event: Promoted | PromotionRefused | CanaryBegun | Quarantined) -> None:
    match event:
        case CanaryBegun():
            text = f"version {event.version} answers {event.share:.0%} of the conversations, {event.served} the others"
            outbox.event("info", "canary", text, version=event.version, share=event.share, figures=event.figures)
        case Promoted():
            text = f"version {event.version} is served ({event.reason})"
            outbox.event("info", "promoted", text, version=event.version, figures=event.figures)
        case PromotionRefused():
            text = f"version {event.version} is not served: {event.reason}"
            outbox.event("warning", "promotion_refused", text, version=event.version, figures=event.figures)
        case Quarantined():
            text = f"{len(event.items)} items of feedback are held back: see the quarantine"
            outbox.event("warning", "quarantined", text, feedback=sorted(event.items))
