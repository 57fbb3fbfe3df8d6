"""Inboxes for replies. All requests of a connection share one wildcard subscription."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.shared.errors import Unavailable
from penstock.shared.protocol.permissions import inbox_of

__all__ = ["Inboxes", "Lost", "Raw", "Reply", "Sink"]


class Lost(Unavailable):
    """The connection broke while a reply was outstanding: the request may or may not have been executed."""


class Raw(Protocol):
    """Message as received. ``headers`` holds 'Status' for the server's control messages."""

    subject: str
    reply: str
    data: bytes
    headers: Mapping[str, str] | None


class Sink(Protocol):
    """Receiver of the messages that arrive in one inbox."""

    def deliver(self, message: Raw) -> None:
        """Handle a message; must not block."""

    def lost(self, error: Lost) -> None:
        """Handle a broken connection: no reply to an earlier request will arrive."""


@dataclass(slots=True)
class Reply:
    """Receiver of one request's reply: resolves ``future`` with the first reply, or with the error."""

    future: asyncio.Future[Raw]

    def deliver(self, message: Raw) -> None:
        """Set the reply as the result of ``future``."""
        if not self.future.done():
            self.future.set_result(message)

    def lost(self, error: Lost) -> None:
        """Set the error as the exception of ``future``."""
        if not self.future.done():
            self.future.set_exception(error)


class Inboxes:
    """Inboxes of one connection, each with its receiver. All share a prefix that the NATS user may subscribe to."""

    def __init__(self, user: str = "") -> None:
        self._user = user
        self.prefix = self.new()
        self._sinks: dict[str, Sink] = {}
        self._counter = 0

    def new(self) -> str:
        """Return the subject of a new inbox, which no other client uses."""
        return f"{inbox_of(self._user)}.{secrets.token_hex(11)}"

    def attach(self, sink: Sink) -> str:
        """Reserve an inbox for ``sink``; return its subject."""
        self._counter += 1
        token = str(self._counter)
        self._sinks[token] = sink
        return f"{self.prefix}.{token}"

    def detach(self, inbox: str) -> None:
        """Release an inbox; late messages to it are ignored."""
        self._sinks.pop(inbox.rpartition(".")[2], None)

    async def dispatch(self, message: Raw) -> None:
        """Pass a message to its sink."""
        sink = self._sinks.get(message.subject.rpartition(".")[2])
        if sink is not None:
            sink.deliver(message)

    def fail(self, error: Lost) -> None:
        """Notify every sink that the connection broke."""
        for sink in list(self._sinks.values()):
            sink.lost(error)
