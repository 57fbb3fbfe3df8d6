"""Events of jobs in the form that webhooks get (CloudEvents 1.0, JSON)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import orjson
import uuid6

from penstock.shared.protocol.jobs import PHASES
from penstock.shared.transport.bus import Message

__all__ = ["CONTENT_TYPE", "CloudEvent", "event_of", "trial_event"]

CONTENT_TYPE = "application/cloudevents+json"
_PREFIX = "events."
_NAMES = {
    "best": "checkpoint.best",
    "canary": "policy.canary",
    "checkpoint": "checkpoint.created",
    "promoted": "policy.promoted",
    "promotion_refused": "policy.promotion_refused",
    "quarantined": "feedback.quarantined",
    "worker_lost": "worker.unhealthy",
    "worker_back": "worker.recovered",
}
"""Events whose type does not say of what they tell."""


class CloudEvent(msgspec.Struct, frozen=True):
    """``id`` is the place in the stream of events: the same in every attempt, for receivers to tell repeats."""

    id: str
    type: str
    body: bytes


def event_of(message: Message) -> CloudEvent:
    """An entry of EVENTS as it is posted."""
    row: dict[str, Any] = msgspec.json.decode(message.data)
    job, id, kind = message.subject.removeprefix(_PREFIX), f"evt_{message.seq}", _type_of(row)
    body = {
        "specversion": "1.0",
        "id": id,
        "source": f"/jobs/{job}",
        "type": kind,
        "subject": job,
        "time": datetime.fromtimestamp(row["time"], UTC).isoformat(),
        "datacontenttype": "application/json",
        "data": {"object": "rl.event", "job": job, "sequence": message.seq, **row},
    }
    return CloudEvent(id, kind, orjson.dumps(body))


def trial_event(webhook: str) -> CloudEvent:
    """An event of no job, to try an address."""
    id, kind = f"evt_{uuid6.uuid7().hex}", "rl.webhook.test.v1"
    body = {
        "specversion": "1.0",
        "id": id,
        "source": f"/webhooks/{webhook}",
        "type": kind,
        "subject": webhook,
        "time": datetime.now(UTC).isoformat(),
        "datacontenttype": "application/json",
        "data": {"object": "rl.event", "type": "test", "message": "a test"},
    }
    return CloudEvent(id, kind, orjson.dumps(body))


def _type_of(row: dict[str, Any]) -> str:
    """``rl.job.PHASE.v1`` where a job entered a phase, else the event's name, or ``rl.TYPE.v1``."""
    phase = str(row["message"]).partition(":")[0]
    if row["type"] == "phase" and phase in PHASES:
        return f"rl.job.{phase}.v1"
    return f"rl.{_NAMES.get(row['type'], row['type'])}.v1"
