"""Bodies of webhook deliveries: job events as CloudEvents, and a test event."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import uuid6

from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.cloudevents import cloud_event
from penstock.shared.transport.bus import Message

__all__ = ["CloudEvent", "event_of", "trial_event"]

_PREFIX = "events."


class CloudEvent(msgspec.Struct, frozen=True):
    """A CloudEvent. ``id`` is the same in all attempts, so that receivers detect repeats; ``body`` is JSON."""

    id: str
    type: str
    body: bytes


def event_of(message: Message) -> CloudEvent:
    """Return the CloudEvent of an entry of EVENTS."""
    row: dict[str, Any] = msgspec.json.decode(message.data)
    body = cloud_event(message.subject.removeprefix(_PREFIX), message.seq, row)
    return CloudEvent(body["id"], body["type"], orjson.dumps(body))


def trial_event(webhook: str) -> CloudEvent:
    """Return a test event, which belongs to no job."""
    id, kind = f"evt_{uuid6.uuid7().hex}", "rl.webhook.test.v1"
    body = {
        "specversion": "1.0",
        "id": id,
        "source": f"/webhooks/{webhook}",
        "type": kind,
        "subject": webhook,
        "time": bus_datetime().isoformat(),
        "datacontenttype": "application/json",
        "data": {"object": "rl.event", "type": "test", "message": "a test"},
    }
    return CloudEvent(id, kind, orjson.dumps(body))
