"""API keys of a deployment, for both clients: ``client.keys``. Needs the scope ``admin``."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.client.calls import Call, make, nothing, show
from penstock.client.results import Key, NewKey
from penstock.client.results.reading import many, one
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
    code_modules: Sequence[str] | None = None,
) -> Call[NewKey]:
    """Create a key; only this reply contains its text, as ``key``.

    ``models``: names or ids of the only jobs that it reaches; ``max_weight``: largest weight of feedback from it;
    ``code_modules``: with the scope jobs:code, modules whose functions its job files may name (`*`: all). A retry after
    a lost reply creates another key: revoke the unused one.
    """
    return make(
        "/v1/keys", one(NewKey), name=name, scopes=list(scopes), expires_in_s=expires_in_s, rate_limit=rate_limit,
        models=None if models is None else list(models), max_weight=max_weight,
        code_modules=None if code_modules is None else list(code_modules),
    )  # fmt: skip


def _list() -> Call[list[Key]]:
    """List the keys."""
    return show("/v1/keys", many(Key))


def _show(id: str) -> Call[Key]:
    """Show a key. Raises NotFound."""
    return show(f"/v1/keys/{id}", one(Key))


def _revoke(id: str) -> Call[None]:
    """Revoke a key. Raises NotFound."""
    return Call("DELETE", f"/v1/keys/{id}", nothing)


class Keys:
    """API keys: ``create``, ``list``, ``show`` and ``revoke``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    create = sends(_create)
    list = sends(_list)
    show = sends(_show)
    revoke = sends(_revoke)


class AsyncKeys:
    """API keys: ``create``, ``list``, ``show`` and ``revoke``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    create = awaits(_create)
    list = awaits(_list)
    show = awaits(_show)
    revoke = awaits(_revoke)
