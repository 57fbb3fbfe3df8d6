"""Feedback on live interactions, as requests of both clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
import uuid6

from penstock.client.calls import Call, Row, Rows, post, show
from penstock.shared.errors import ConfigError

__all__ = ["Items", "Value", "batches", "retract", "send", "status"]

Value = bool | float | str | Mapping[str, Any]
Items = Iterable[Mapping[str, Any]]
"""Items as `POST /v1/feedback` takes them."""

MAX_ITEMS, MAX_BYTES = 256, 7 << 20


def send(
    metric: str, value: Value, *, inference: str | None, episode: str | None, id: str | None, **more: Any
) -> Call[Row]:
    """Post one verdict.

    Raises:
        ConfigError: neither or both of ``inference`` and ``episode``.
    """
    if (inference is None) == (episode is None):
        raise ConfigError("feedback is about an inference or about an episode: give one of them")
    target = {"inference_id": inference} if inference is not None else {"episode_id": episode}
    named = {"feedback_id": id or str(uuid6.uuid7()), "metric_name": metric, "value": value}
    return post("/v1/feedback", {**named, **target, **{key: item for key, item in more.items() if item is not None}})


def batches(items: Items) -> Iterator[Call[Rows]]:
    """Requests that post ``items`` in order; an item without an id gets one, so that it can be sent again."""
    some: list[bytes] = []
    for item in items:
        data = orjson.dumps({"feedback_id": str(uuid6.uuid7()), **item})
        if some and (len(some) == MAX_ITEMS or sum(map(len, some)) + len(data) > MAX_BYTES):
            yield _batch(some)
            some = []
        some.append(data)
    if some:
        yield _batch(some)


def status(id: str) -> Call[Row]:
    """What became of an item."""
    return show(f"/v1/feedback/{id}", dict)


def retract(id: str) -> Call[Row]:
    """Take an item back."""
    return post(f"/v1/feedback/{id}/retract")


def _batch(some: list[bytes]) -> Call[Rows]:
    return Call("POST", "/v1/feedback/batch", lambda data: list(data["data"]), body=b"[" + b",".join(some) + b"]")
