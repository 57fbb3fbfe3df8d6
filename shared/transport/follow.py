"""Reading a stream in order, without acknowledgements: an ephemeral pull consumer that is rebuilt whenever in doubt.

The reader drives everything from ``__anext__``: no background task, a bounded buffer, and the next request to the
server goes out when the buffer is half empty. A lost connection, a server restart, a gap in the consumer's sequence or
silence past the request's expiry all lead to the same cure: a new consumer that starts behind the last message read.
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
"""At most this much is asked for at once; more than the largest message, or that one would never come."""
EXPIRES_S = 2.0
"""Life of a request. Short, because a fail-over can forget it without breaking the connection."""
PAUSE_S = 0.05
"""Before a consumer is rebuilt once more though the one before brought nothing."""
RECONNECT_S = 10.0
"""How long a reader that ends waits for a lost connection; one that follows waits for ever."""
INACTIVE_S = 30.0
"""The server deletes the consumer after this long without requests."""


class Reader:
    """Async iterator over the messages of ``stream`` on ``subject`` from ``start_seq`` on.

    ``aclose`` it when done early (``contextlib.aclosing``); one that is merely forgotten is cleaned up when collected.

    With ``follow=False`` it ends at the end that the stream has when the end is reached.
    With ``last_per_subject`` it starts with the newest message of each subject.
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
        self._expected = 1  # consumer sequence of the next message
        self._outstanding = 0  # messages that open requests may still bring
        self._requests = 0
        self._broken = True
        self._closed = False
        self._rebuilds = 0  # since the last message
        self._in_cluster = False
        self._remaining = 1  # messages of the stream behind the last one handed out
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
        """Give the consumer back. Harmless when repeated."""
        self._closed = True
        self._wake.set()
        self._connection.inboxes.detach(self._watch)
        if self._inbox is not None:
            inbox, self._inbox = self._inbox, None
            await inbox.close()
        await self._drop()

    def on_lost(self) -> None:
        """The connection broke: what is in the buffer stands, the rest is asked for again."""
        self._broken = True
        self._wake.set()

    def _wants_more(self) -> bool:
        return self._follow or self._remaining > len(self._buffer)

    async def _fill(self) -> None:
        """Wait for a message, or for something that explains why there is none."""
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
            self._broken = True  # the server forgot the request

    async def _is_behind(self) -> bool:
        """True if the consumer is on a replica that lags: the leader of the stream has more."""
        if not self._in_cluster:
            return False
        found = await first_at_or_after(self._connection, self._stream, self._subject, max(self._next_seq, 1))
        if found is not None:
            log.info("the replica that reads %s for us lags at %d: trying another", self._stream, self._next_seq)
        return found is not None

    async def _rebuild(self) -> None:
        """A new consumer behind the last message handed out (waits for the connection as long as it takes)."""
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
        """Request the next messages; False where the connection is down (then everything is rebuilt)."""
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
        """A subject of its own for each request, to tell the end of this one from the late end of another."""
        prefix = self._inbox.subject.removesuffix("*") if self._inbox is not None else ""
        return f"{prefix}{self._requests}"

    def on_message(self, raw: Raw) -> None:
        """Take what the consumer sends: a message, or a status that ends a request."""
        headers = raw.headers or {}
        if "Status" in headers:
            if raw.subject == self._reply_to():
                is_empty, self._outstanding = self._outstanding == BATCH and not self._buffer, 0
                self._broken = self._broken or not ended_well(headers["Status"], headers.get("Description", ""))
                # Of what was pending when the consumer began the rest was deleted: a new one knows what is left.
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
            with contextlib.suppress(Unavailable):  # then it ends by itself after INACTIVE_S
                await drop_consumer(self._connection, self._stream, name)


class _Weak:
    """State of a reader that the connection holds, so that an abandoned reader can be collected."""

    def __init__(self, reader: Reader) -> None:
        self.inbox: Subscription | None = None
        self._reader = weakref.ref(reader)

    def deliver(self, message: Raw) -> None:
        """Nothing is sent to this inbox; it exists to hear of a lost connection."""

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
