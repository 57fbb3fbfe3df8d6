"""API keys of a deployment, for both clients: ``client.keys``. Needs the scope ``admin``."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.client.calls import Call, Row, Rows, nothing, post, show
from penstock.client.sending import AsyncSend, Send, awaits, sends

__all__ = ["AsyncKeys", "Keys"]


def _create(
    name: str,
    scopes: Sequence[str],
    *,
    expires_in_s: float | None = None,
    rate_limit: str | None = None,
    models: Sequence[str] | None = None,
    max_weight: float | None = None,
) -> Call[Row]:
    """Make a key; its text stands under ``key`` in the reply and nowhere else.

    ``models``: names or ids of the only jobs that it reaches; ``max_weight``: what its feedback counts at
    most. After a reply that was lost another key is made: revoke one of this name that nobody has.
    """
    body = {
        "name": name, "scopes": list(scopes), "expires_in_s": expires_in_s, "rate_limit": rate_limit,
        "models": None if models is None else list(models), "max_weight": max_weight,
    }  # fmt: skip
    return post("/v1/keys", {key: value for key, value in body.items() if value is not None})


def _list() -> Call[Rows]:
    """The keys there are."""
    return show("/v1/keys", lambda data: list(data["data"]))


def _show(id: str) -> Call[Row]:
    """One of them. Raises NotFound."""
    return show(f"/v1/keys/{id}", dict)


def _revoke(id: str) -> Call[None]:
    """End a key. Raises NotFound."""
    return Call("DELETE", f"/v1/keys/{id}", nothing)


class Keys:
    """Make, list and revoke keys: ``create``, ``list``, ``show``, ``revoke``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    create = sends(_create)
    list = sends(_list)
    show = sends(_show)
    revoke = sends(_revoke)


class AsyncKeys:
    """Make, list and revoke keys: ``create``, ``list``, ``show``, ``revoke``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    create = awaits(_create)
    list = awaits(_list)
    show = awaits(_show)
    revoke = awaits(_revoke)
