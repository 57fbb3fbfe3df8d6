"""What a ledger comes to, for people. Pure."""

from __future__ import annotations

from typing import Any

from penstock.services.coordinator.ledger import LedgerState

__all__ = ["best_of", "draws_of", "summary_of"]


def draws_of(state: LedgerState) -> dict[str, Any]:
    """The ledger equation."""
    return {
        "drawn": state.drawn,
        "trained": state.trained,
        "dropped": dict(state.dropped),
        "in_flight": len(state.open),
    }


def best_of(state: LedgerState) -> dict[str, Any] | None:
    """The best checkpoint, and by what it is the best."""
    best = state.best
    if best is None:
        return None
    path = state.checkpoints[best.number].path
    return {"number": best.number, "metric": best.metric, "value": best.value, "step": best.step, "path": path}


def summary_of(state: LedgerState) -> dict[str, Any]:
    """What the last event of a job says of it."""
    return {
        "updates": state.updates,
        "version": state.version,
        "digest": state.digest,
        "draws": draws_of(state),
        "best_checkpoint": best_of(state),
    }
