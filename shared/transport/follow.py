"""Ordered reading of a stream, without acknowledgements: an ephemeral pull consumer that is rebuilt after any fault.

``__anext__`` drives the reader: there is no background task, the buffer is bounded, and the next request to the server
is sent when the buffer is half empty. A lost connection, a server restart, a gap in the consumer's sequence numbers or
silence past the request's expiry all have the same remedy: a new consumer that starts after the last message read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import weakref
from collections import deque
from typing import Any

import msgspec

from penstock.shared.errors import Unavailable
from penstock.shared.transport.connection import Connection, Subscription
from penstock.shared.transport.inbox import Lost, Raw
from penstock.shared.transport.jetstream import create_consumer, drop_consumer, ended_well
from penstock.shared.transport.message import Message, from_consumer
from penstock.shared.transport.read import first_at_or_after

__all__ = ["Reader"]

log = logging.getLogger(__name__)

BATCH = 256
BATCH_BYTES = 16 << 20
"""Bytes per request; more than the largest message, which would otherwise never be delivered."""
EXPIRES_S = 2.0
"""Lifetime of a request (seconds). Short, because a fail-over can lose it without breaking the connection."""
PAUSE_S = 0.05
"""Pause before rebuilding a consumer again if the last one delivered nothing (seconds)."""
RECONNECT_S = 10.0
"""Longest time that a scan waits for a reconnect (seconds); a reader that follows waits without limit."""
INACTIVE_S = 30.0
"""Time without requests after which the server deletes the consumer (seconds)."""


class Reader:
    """Async iterator over the messages of ``stream`` on ``subject`` from ``start_seq`` on.

    ``aclose`` it when done early (``contextlib.aclosing``); otherwise garbage collection cleans it up.

    With ``follow=False`` it stops once it has returned every message that the stream has by then. With
    ``last_per_subject`` it starts with the newest message of each subject.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subject: str,
        *,
        start_seq: int = 1,
        headers_only: bool = False,
        follow: bool = True,
        last_per_subject: bool = False,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._subject = subject
        self._next_seq = start_seq
        self._headers_only = headers_only
        self._follow = follow
        self._last_per_subject = last_per_subject
        self._handed_out = False
        self._consumer = ""
        self._inbox: Subscription | None = None
        self._buffer: deque[tuple[Message, int]] = deque()
        self._wake = asyncio.Event()
        self._expected = 1  # consumer sequence number of the next message
        self._outstanding = 0  # messages that open requests may still deliver
        self._requests = 0
        self._broken = True
        self._closed = False
        self._rebuilds = 0  # since the last message
        self._in_cluster = False
        self._remaining = 1  # messages of the stream after the last one returned
        self._watch = connection.inboxes.attach(_Weak(self))
        weakref.finalize(self, connection.inboxes.detach, self._watch)

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Message:
        while not self._buffer:
            if self._closed:
                raise StopAsyncIteration
            if not self._follow and self._remaining == 0 and not self._broken:
                if not await self._is_behind():
                    await self.aclose()
                    raise StopAsyncIteration
                self._broken = True
            await self._fill()
        message, self._remaining = self._buffer.popleft()
        self._next_seq = message.seq + 1
        self._handed_out = True
        if not self._broken and self._outstanding == 0 and len(self._buffer) < BATCH // 2 and self._wants_more():
            await self._ask()
        return message

    async def aclose(self) -> None:
        """Delete the consumer. Idempotent."""
        self._closed = True
        self._wake.set()
        self._connection.inboxes.detach(self._watch)
        if self._inbox is not None:
            inbox, self._inbox = self._inbox, None
            await inbox.close()
        await self._drop()

    def on_lost(self) -> None:
        """Handle a broken connection: buffered messages stay valid; the following messages are requested again."""
        self._broken = True
        self._wake.set()

    def _wants_more(self) -> bool:
        return self._follow or self._remaining > len(self._buffer)

    async def _fill(self) -> None:
        """Wait until a message has arrived, or until the server has reported why none will."""
        if self._broken:
            await self._rebuild()
            if self._broken or (not self._follow and self._remaining == 0):
                return
        if self._outstanding == 0 and not await self._ask():
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(EXPIRES_S * 2):
                await self._wake.wait()
        except TimeoutError:
            self._broken = True  # the server lost the request

    async def _is_behind(self) -> bool:
        """Return True if the stream's leader has messages that this consumer's replica lacks."""
        if not self._in_cluster:
            return False
        found = await first_at_or_after(self._connection, self._stream, self._subject, max(self._next_seq, 1))
        if found is not None:
            log.info("the replica that reads %s for us lags at %d: trying another", self._stream, self._next_seq)
        return found is not None

    async def _rebuild(self) -> None:
        """Create a consumer that starts after the last returned message. First wait for the connection: without limit,
        or for at most ``RECONNECT_S`` in a scan."""
        if self._inbox is None:
            weak = _Weak(self)
            self._inbox = await self._connection.subscribe(
                self._connection.inboxes.new() + ".*", weak.on_message, confirm=False
            )
            weak.inbox = self._inbox
        await self._wait_connected()
        await asyncio.sleep(min(PAUSE_S * self._rebuilds, 1.0))
        self._rebuilds += 1
        await self._drop()
        self._consumer = f"r{secrets.token_hex(9)}"
        self._buffer.clear()
        self._expected, self._outstanding = 1, 0
        try:
            info = await create_consumer(self._connection, self._stream, self._config(), deadline_s=10.0)
        except Unavailable as error:
            if not self._follow or self._connection.closed:
                raise
            log.warning("cannot follow %s yet: %s", self._stream, error)
            return
        self._remaining = int(info["num_pending"])
        self._in_cluster = bool((info.get("cluster") or {}).get("name"))
        self._broken = False

    async def _ask(self) -> bool:
        """Request the next messages; return False if the connection is down (then the consumer is rebuilt)."""
        body = {"batch": BATCH, "max_bytes": BATCH_BYTES, "expires": int(EXPIRES_S * 1e9)}
        endpoint = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        self._requests += 1
        self._outstanding = BATCH
        try:
            await self._connection.send(endpoint, msgspec.json.encode(body), reply=self._reply_to())
        except Unavailable:
            self._broken = True
            return False
        return True

    def _reply_to(self) -> str:
        """Return the reply subject of the newest request. It differs for each request, so that a late status of an
        earlier request does not end the newest one."""
        prefix = self._inbox.subject.removesuffix("*") if self._inbox is not None else ""
        return f"{prefix}{self._requests}"

    def on_message(self, raw: Raw) -> None:
        """Handle a message from the consumer, or a status that ends a request."""
        headers = raw.headers or {}
        if "Status" in headers:
            if raw.subject == self._reply_to():
                is_empty, self._outstanding = self._outstanding == BATCH and not self._buffer, 0
                self._broken = self._broken or not ended_well(headers["Status"], headers.get("Description", ""))
                # Messages that were pending when the consumer began were deleted: a new consumer knows which ones are
                # left.
                self._broken = self._broken or (is_empty and not self._follow)
                self._wake.set()
            return
        message, info = from_consumer(raw)
        if info.consumer != self._consumer:
            return
        if info.consumer_seq != self._expected:
            self._broken = True
        elif not self._broken:
            self._expected, self._rebuilds = self._expected + 1, 0
            self._outstanding = max(self._outstanding - 1, 0)
            self._buffer.append((message, info.pending))
        self._wake.set()

    async def _wait_connected(self) -> None:
        while not self._connection.connected:
            try:
                await self._connection.wait_connected(RECONNECT_S)
            except Unavailable:
                if self._connection.closed or not self._follow:
                    raise

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": self._consumer,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(INACTIVE_S * 1e9),
            "headers_only": self._headers_only,
            "filter_subject": self._subject,
        }
        if self._last_per_subject and not self._handed_out:
            return config | {"deliver_policy": "last_per_subject"}
        return config | {"deliver_policy": "by_start_sequence", "opt_start_seq": max(self._next_seq, 1)}

    async def _drop(self) -> None:
        if self._consumer:
            name, self._consumer = self._consumer, ""
            with contextlib.suppress(Unavailable):  # then the server deletes it after INACTIVE_S
                await drop_consumer(self._connection, self._stream, name)


class _Weak:
    """Receiver that the connection references instead of the reader itself, so that an abandoned reader can be
    garbage-collected."""

    def __init__(self, reader: Reader) -> None:
        self.inbox: Subscription | None = None
        self._reader = weakref.ref(reader)

    def deliver(self, message: Raw) -> None:
        """Ignore a message: this inbox is registered only so that the connection can call ``lost``."""

    def lost(self, error: Lost) -> None:
        reader = self._reader()
        if reader is not None:
            reader.on_lost()

    async def on_message(self, raw: Raw) -> None:
        reader = self._reader()
        if reader is not None:
            reader.on_message(raw)
        elif self.inbox is not None:
            await self.inbox.close()
