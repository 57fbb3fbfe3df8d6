"""Inputs of a decision: facts of one moment that neither the ledger nor a group contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Evaluated", "Inputs", "Rollback"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The newest complete evaluation: its version and its values."""

    version: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback of training to its state after batch ``number``; ``operation`` is the request, or ''."""

    number: int
    reason: str
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Facts that the leader passes to each decision of a run: the time, the requests of users, and its own
    observations."""

    now: float
    """Bus time (Unix seconds)."""
    desired: str = "running"
    """State that the user requested: running, paused or cancelled."""
    cancel_now: bool = False
    """True if a cancelled run ends without training the sealed batches and without a last checkpoint."""
    last_checkpoint: bool = True
    """True if a cancelled run checkpoints before it ends."""
    checkpoint_requested: bool = False
    """True if the user requested a checkpoint."""
    replays: int = 0
    """Number of dead letters to replay, for which the run reserves slots in flight."""
    rollback: Rollback | None = None
    """Rollback that a user requested."""
    forced: int = -1
    """Version that a user forces to be served in spite of its measurements; -1: none."""
    announced: int = -1
    """Version in the manifest that engines watch; -1: unknown."""
    evaluated: Evaluated | None = None
    """The newest evaluation, None before the first."""
    environment: dict[str, Any] | None = None
    """Description of the simulator of an embodied job; None until an env worker returns it."""
    stop_early: str = ""
    """Reason to train no further batch, or '' if there is none."""
    new_best: str = ""
    """Reason for a checkpoint because a metric has a new best value, or '' if none is needed."""
