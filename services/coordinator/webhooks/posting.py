"""Posts an event once to the address of a webhook: one attempt of a delivery."""

from __future__ import annotations

import asyncio

import httpx

from penstock.services.coordinator.webhooks.cloudevent import CloudEvent
from penstock.services.coordinator.webhooks.signing import signature_headers
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.cloudevents import CLOUD_EVENT
from penstock.shared.protocol.webhooks import StoredWebhook
from penstock.shared.transport.address import pinned

__all__ = ["GoneError", "open_http", "post_event"]

TIMEOUT_S = 10.0


class GoneError(PenstockError):
    """Error that disables a webhook: the receiver answered 410, or refused an event for too long."""


def open_http() -> httpx.AsyncClient:
    """Return a client for deliveries. Proxies and redirects are off, since both would bypass the address check."""
    return httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, follow_redirects=False)


async def post_event(http: httpx.AsyncClient, hook: StoredWebhook, event: CloudEvent, *, private: bool) -> None:
    """Post an event once. The address must be public, unless ``private`` allows any.

    Raises:
        Unavailable: the receiver did not accept the event; the message has the reason.
        GoneError: the receiver answered 410.
    """
    try:
        url = httpx.URL(hook.url)
        target, netloc, name = await pinned(url, private=private)
        headers = {
            "Host": netloc,
            "Content-Type": CLOUD_EVENT,
            "User-Agent": "penstock",
            **signature_headers(hook.secret, event.id, int(bus_time()), event.body),
        }
        async with asyncio.timeout(TIMEOUT_S):
            async with http.stream(
                "POST", target, content=event.body, headers=headers,
                extensions={"sni_hostname": name},
            ) as reply:  # fmt: skip
                status = reply.status_code  # the body of the response is not read
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
        raise Unavailable(f"{hook.url} did not answer: {error or type(error).__name__}") from None
    if status == httpx.codes.GONE:
        raise GoneError(f"{hook.url} answers 410: it wants no more deliveries")
    if not httpx.codes.is_success(status):
        raise Unavailable(f"{hook.url} answers {status}")
