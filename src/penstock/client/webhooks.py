"""Where events are posted, for both clients: ``client.webhooks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.client.calls import Call, Row, Rows, nothing, post, show
from penstock.client.sending import AsyncSend, Send, awaits, sends

__all__ = ["AsyncWebhooks", "Webhooks"]


def _create(
    url: str, *, types: Sequence[str] | None = None, job: str | None = None, description: str = ""
) -> Call[Row]:
    """Have events posted to ``url`` from now on; the ``secret`` that signs them stands in this reply and nowhere else.

    ``types``: which ones; a trailing ``*`` stands for any ending; default: that jobs ended. ``job``: only of this one.
    """
    body: dict[str, Any] = {"url": url, "description": description}
    body |= {} if types is None else {"types": list(types)}
    return post("/v1/webhooks", body if job is None else {**body, "job": job})


def _list() -> Call[Rows]:
    """The webhooks there are."""
    return show("/v1/webhooks", lambda data: list(data["data"]))


def _show(id: str) -> Call[Row]:
    """One of them, and how far its ``deliveries`` are. Raises NotFound."""
    return show(f"/v1/webhooks/{id}", dict)


def _change(
    id: str, *, enabled: bool | None = None, url: str | None = None, types: Sequence[str] | None = None
) -> Call[Row]:
    """Change it, or switch it off and on; what happened in between is delivered once it is on. Raises NotFound."""
    body = {"enabled": enabled, "url": url, "types": None if types is None else list(types)}
    data = orjson.dumps({key: value for key, value in body.items() if value is not None})
    return Call("PATCH", f"/v1/webhooks/{id}", dict, body=data)


def _test(id: str) -> Call[Row]:
    """Post a test event now: ``delivered``, or ``error``. Raises NotFound."""
    return post(f"/v1/webhooks/{id}/test")


def _delete(id: str) -> Call[None]:
    """Forget it. Raises NotFound."""
    return Call("DELETE", f"/v1/webhooks/{id}", nothing)


class Webhooks:
    """``create``, ``list``, ``show``, ``change``, ``test`` and ``delete`` webhooks."""

    def __init__(self, send: Send) -> None:
        self._send = send

    create = sends(_create)
    list = sends(_list)
    show = sends(_show)
    change = sends(_change)
    test = sends(_test)
    delete = sends(_delete)


class AsyncWebhooks:
    """``create``, ``list``, ``show``, ``change``, ``test`` and ``delete`` webhooks."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    create = awaits(_create)
    list = awaits(_list)
    show = awaits(_show)
    change = awaits(_change)
    test = awaits(_test)
    delete = awaits(_delete)
