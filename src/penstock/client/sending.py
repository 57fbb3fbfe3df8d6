"""How parts of a client send: what a client gives them."""

from __future__ import annotations

from typing import Protocol, TypeVar

from penstock.client.calls import Call

__all__ = ["AsyncSend", "Send"]

T = TypeVar("T")


class Send(Protocol):
    """Sends a call and reads its reply, with the client's retries."""

    def __call__(self, call: Call[T], /) -> T:
        """Raises the errors of ``penstock.shared.errors``."""
        ...


class AsyncSend(Protocol):
    """As ``Send``, awaited."""

    async def __call__(self, call: Call[T], /) -> T:
        """Raises the errors of ``penstock.shared.errors``."""
        ...
