"""Webhooks (addresses that receive events) for both clients: ``client.webhooks``."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from penstock.client.calls import Call, make, nothing, show
from penstock.client.results import NewWebhook, Webhook, WebhookState, WebhookTrial
from penstock.client.results.reading import many, one
from penstock.client.sending import AsyncSend, Send, awaits, sends

__all__ = ["AsyncWebhooks", "Webhooks"]


def _create(
    url: str, *, types: Sequence[str] | None = None, job: str | None = None, description: str = ""
) -> Call[NewWebhook]:
    """Create a webhook: ``url`` receives events from now on. Only this reply contains its signing ``secret``.

    ``types``: event types, where a trailing ``*`` matches any ending; default: ends of jobs. ``job``: id of a job; only
    its events are sent.
    """
    wanted = None if types is None else list(types)
    return make("/v1/webhooks", one(NewWebhook), url=url, types=wanted, job=job, description=description)


def _list() -> Call[list[Webhook]]:
    """List the webhooks."""
    return show("/v1/webhooks", many(Webhook))


def _show(id: str) -> Call[WebhookState]:
    """Show a webhook and the progress of its ``deliveries``. Raises NotFound."""
    return show(f"/v1/webhooks/{id}", one(WebhookState))


def _change(
    id: str, *, enabled: bool | None = None, url: str | None = None, types: Sequence[str] | None = None
) -> Call[Webhook]:
    """Change a webhook, or disable and enable it; events of a disabled period are delivered later. Raises NotFound."""
    body = {"enabled": enabled, "url": url, "types": None if types is None else list(types)}
    data = orjson.dumps({key: value for key, value in body.items() if value is not None})
    return Call("PATCH", f"/v1/webhooks/{id}", one(Webhook), body=data)


def _test(id: str) -> Call[WebhookTrial]:
    """Post a test event now; return ``delivered``, or ``error``. Raises NotFound."""
    return Call("POST", f"/v1/webhooks/{id}/test", one(WebhookTrial))


def _delete(id: str) -> Call[None]:
    """Delete a webhook. Raises NotFound."""
    return Call("DELETE", f"/v1/webhooks/{id}", nothing)


class Webhooks:
    """Webhooks: ``create``, ``list``, ``show``, ``change``, ``test`` and ``delete``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    create = sends(_create)
    list = sends(_list)
    show = sends(_show)
    change = sends(_change)
    test = sends(_test)
    delete = sends(_delete)


class AsyncWebhooks:
    """Webhooks: ``create``, ``list``, ``show``, ``change``, ``test`` and ``delete``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    create = awaits(_create)
    list = awaits(_list)
    show = awaits(_show)
    change = awaits(_change)
    test = awaits(_test)
    delete = awaits(_delete)
