"""Job events as CloudEvents 1.0 (JSON), for webhooks and, on request, for the API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from penstock.shared.protocol.jobs import PHASES

__all__ = ["CLOUD_EVENT", "EVENT_TYPES", "cloud_event"]

CLOUD_EVENT = "application/cloudevents+json"
"""Media type of a CloudEvent."""
_NAMES = {
    "best": "checkpoint.best",
    "canary": "policy.canary",
    "checkpoint": "checkpoint.created",
    "checkpoint_damaged": "checkpoint.damaged",
    "promoted": "policy.promoted",
    "promotion_refused": "policy.promotion_refused",
    "quarantined": "feedback.quarantined",
    "worker_lost": "worker.unhealthy",
    "worker_back": "worker.recovered",
    "worker_problem": "worker.problem",
}
"""Names of some event types as CloudEvents, by type in the stream EVENTS. Outside of the stream, the types themselves
would be ambiguous."""
_OTHERS = (
    "asked", "blocked", "clock_skew", "dead_letter", "dropped", "evaluation", "extended", "halted", "health",
    "ledger_filling", "lineage_forked", "metric", "phase", "settings", "step", "submitted", "tracking",
)  # fmt: skip
EVENT_TYPES = tuple(
    f"rl.{name}.v1" for name in (*(f"job.{phase}" for phase in PHASES), *sorted({*_NAMES.values(), *_OTHERS}))
)
"""Types of all job events, in the form of CloudEvents."""


def cloud_event(job: str, seq: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of EVENTS as a CloudEvent. Its ``id`` derives from ``seq``, so that receivers recognize repeats.

    Args:
        seq: stream sequence number of the entry.
        row: stored entry, with at least ``time`` (Unix seconds), ``type`` and ``message``.
    """
    return {
        "specversion": "1.0",
        "id": f"evt_{seq}",
        "source": f"/jobs/{job}",
        "type": _type_of(row),
        "subject": job,
        "time": datetime.fromtimestamp(row["time"], UTC).isoformat(),
        "datacontenttype": "application/json",
        "data": {"object": "rl.event", "job": job, "sequence": seq, **row},
    }


def _type_of(row: Mapping[str, Any]) -> str:
    """Return the CloudEvents type of an event: ``rl.job.PHASE.v1`` for a change of phase, else ``rl.NAME.v1``."""
    phase = str(row["message"]).partition(":")[0]
    if row["type"] == "phase" and phase in PHASES:
        return f"rl.job.{phase}.v1"
    return f"rl.{_NAMES.get(row['type'], row['type'])}.v1"
