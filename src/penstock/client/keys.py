"""API keys of a deployment, for both clients: ``client.keys``. Needs the scope ``admin``."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.client.calls import Call, Row, Rows, nothing, post, show
from penstock.client.sending import AsyncSend, Send

__all__ = ["AsyncKeys", "Keys"]


class Keys:
    """Make, list and revoke keys."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def create(
        self, name: str, scopes: Sequence[str], *, expires_in_s: float | None = None, rate_limit: str | None = None
    ) -> Row:
        """Make a key; its text stands under ``key`` in the reply and nowhere else."""
        return self._send(_create(name, scopes, expires_in_s, rate_limit))

    def list(self) -> Rows:
        """The keys there are."""
        return self._send(_list())

    def revoke(self, id: str) -> None:
        """End a key. Raises NotFound."""
        self._send(_revoke(id))


class AsyncKeys:
    """Make, list and revoke keys."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    async def create(
        self, name: str, scopes: Sequence[str], *, expires_in_s: float | None = None, rate_limit: str | None = None
    ) -> Row:
        """Make a key; its text stands under ``key`` in the reply and nowhere else."""
        return await self._send(_create(name, scopes, expires_in_s, rate_limit))

    async def list(self) -> Rows:
        """The keys there are."""
        return await self._send(_list())

    async def revoke(self, id: str) -> None:
        """End a key. Raises NotFound."""
        await self._send(_revoke(id))


def _create(name: str, scopes: Sequence[str], expires_in_s: float | None, rate_limit: str | None) -> Call[Row]:
    body = {"name": name, "scopes": list(scopes), "expires_in_s": expires_in_s, "rate_limit": rate_limit}
    return post("/v1/keys", {key: value for key, value in body.items() if value is not None})


def _list() -> Call[Rows]:
    return show("/v1/keys", lambda data: list(data["data"]))


def _revoke(id: str) -> Call[None]:
    return Call("DELETE", f"/v1/keys/{id}", nothing)
