"""Summaries of a ledger for status records and reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.services.coordinator.training.canary import row_of
from penstock.services.coordinator.training.gate import Verdict
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.service import checkpoint_path
from penstock.shared.protocol.events import Checkpointed

__all__ = [
    "best_of",
    "canary_of",
    "draws_of",
    "phase_of",
    "queues_of",
    "retention_of",
    "start_of",
    "status_of",
    "summary_of",
]

MAX_REPEATED = 2000
"""Maximum number of batches that a trainer may repeat from an older checkpoint; all must fit into one response."""


def draws_of(state: LedgerState) -> dict[str, Any]:
    """Return the ledger equation: drawn = trained + dropped + in flight."""
    return {
        "drawn": state.drawn,
        "trained": state.trained,
        "dropped": dict(state.dropped),
        "in_flight": len(state.open),
    }


def best_of(state: LedgerState, data_dir: Path = Path()) -> dict[str, Any] | None:
    """Return the best checkpoint and the metric that chose it, or None."""
    best = state.best
    if best is None:
        return None
    path = str(checkpoint_path(data_dir, state.checkpoints[best.number].path))
    return {"number": best.number, "metric": best.metric, "value": best.value, "step": best.step, "path": path}


def canary_of(run: JobRun) -> dict[str, Any] | None:
    """Return the progress of the canary trial in which a version serves a share of live traffic; None if there is no
    trial."""
    canary, gate = run.state.canary, run.promotion
    if canary is None or gate is None or gate.config.canary is None or run.state.finished:
        return None
    return row_of(gate.config.canary, canary, gate.arms(run.state))


def phase_of(run: JobRun, inputs: Inputs, desired: str) -> str:
    """Return the phase of a job as shown to users; ``desired`` is the requested state."""
    state = run.state
    if state.finished:
        return state.finished
    if desired == "cancelled":
        return "cancelling"
    if desired == "paused":
        settled = run.halted(inputs) or not (state.trainable or run.wants_checkpoint(inputs))
        return "paused" if settled else "pausing"
    return "running" if state.checkpoint is not None or state.started else "pending"


def status_of(run: JobRun, inputs: Inputs, desired: str) -> dict[str, Any]:
    """Return the part of a job's status that its run determines."""
    state, phase = run.state, phase_of(run, inputs, desired)
    failure, promoted = run.failure.message if run.failure is not None else "", state.promoted
    return {
        "phase": phase,
        "message": failure or run.halted(inputs) or inputs.stop_early,
        "error": run.failure if phase == "failed" else None,
        "step": state.updates,
        "policy_version": state.version,
        "served_version": None if promoted is None else promoted.version,
        "promoted_at": None if promoted is None else datetime.fromtimestamp(promoted.time, UTC),
        "canary": canary_of(run),
        "draws": draws_of(state),
        "queues": queues_of(run),
        "checkpoint": None if state.checkpoint is None else str(run.path_of(state.checkpoint)),
        "best_checkpoint": best_of(state, run.data_dir),
    }


def queues_of(run: JobRun) -> dict[str, int]:
    """Return the work at each stage: tickets without a group, usable groups without a batch, untrained batches."""
    opened, accept = run.state.open, Verdict.ACCEPT
    waiting = sum(not info.batch for info in opened.values())
    groups = [c.verdict for d, c in run.candidates.items() if (info := opened.get(d)) is not None and not info.batch]
    usable = sum(verdict is accept for verdict in groups)
    return {"tickets": waiting - len(groups), "groups": usable, "batches": len(run.state.sealed)}


def retention_of(run: JobRun) -> dict[str, Any]:
    """Return the checkpoints that the trainer keeps: the newest ``keep``, and the ``pinned`` ones of any age."""
    return {"pinned": run.state.pinned, "keep": run.config.checkpoint.keep}


def start_of(run: JobRun, inputs: Inputs) -> dict[str, Any]:
    """Return the point from which a trainer continues the job.

    ``served``: an older version that engines still need; the trainer recomputes it on the way. ``rollback``: the batch
    after which the trainer must discard the lineage, and why.
    """
    state, rollback, served = run.state, run.rollback(inputs), run.state.promoted
    behind = served is not None and served.version != state.version
    checkpoint = state.checkpoint
    if rollback is not None:
        checkpoint = state.base_of(rollback.number)
    elif served is not None and behind:
        checkpoint = state.base_of(served.number)
    after = checkpoint.number if checkpoint else 0
    return {
        "checkpoint": None if checkpoint is None else {"number": checkpoint.number, "path": checkpoint.path},
        "version": state.version,
        "digest": state.digest,
        "last_trained": state.last_trained,
        "pinned": state.pinned,
        "served": {"number": served.number, "version": served.version} if served is not None and behind else None,
        "rollback": None if rollback is None else asdict(rollback),
        "batches": _rows_of(state, state.after(after)),
        "environment": state.environment or inputs.environment,
        **_older(state, checkpoint),
    }


def _older(state: LedgerState, checkpoint: Checkpointed | None) -> dict[str, Any]:
    """Return the entries ``older`` and ``earlier``, which a trainer needs if it cannot read ``checkpoint``. ``older``
    lists earlier checkpoints, newest first; after loading any of them, the trainer can repeat all later batches.
    ``earlier`` has the rows of the batches that it may have to repeat in addition: all batches after the oldest
    checkpoint in ``older``, up to the batch of ``checkpoint``."""
    if checkpoint is None:
        return {}
    found: list[Checkpointed] = []
    for number in sorted((n for n in state.checkpoints if n < checkpoint.number), reverse=True):
        again = state.after(number)
        if len(again) > MAX_REPEATED or not all(n in state.batches for n in again):
            break
        found.append(state.checkpoints[number])
    first = found[-1].number if found else checkpoint.number
    return {
        "older": [{"number": one.number, "path": one.path} for one in found],
        "earlier": _rows_of(state, [n for n in state.after(first) if n <= checkpoint.number]),
    }


def _rows_of(state: LedgerState, numbers: Iterable[int]) -> list[list[Any]]:
    """Return number, revision, version and digest of each batch in ``numbers`` that is still in the ledger's state."""
    known = [(n, state.batches[n]) for n in numbers if n in state.batches]
    return [[n, batch.revision, batch.version, batch.digest] for n, batch in known]


def summary_of(state: LedgerState) -> dict[str, Any]:
    """Return the summary that the last event of a job contains."""
    return {
        "updates": state.updates,
        "version": state.version,
        "digest": state.digest,
        "draws": draws_of(state),
        "best_checkpoint": best_of(state),
    }
