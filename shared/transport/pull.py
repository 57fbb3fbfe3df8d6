"""Work queues with acknowledgements. Pull requests expire after a second and are repeated, so that a lost request
delays a worker only briefly."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.shared.errors import Unavailable
from penstock.shared.transport.connection import Connection, Subscription
from penstock.shared.transport.inbox import Lost, Raw
from penstock.shared.transport.jetstream import create_consumer, ended_well
from penstock.shared.transport.message import from_consumer

__all__ = ["Delivery", "Puller"]

log = logging.getLogger(__name__)

EXPIRES_S = 1.0
"""Lifetime of a request (seconds); the loop repeats it, so a request lost in a fail-over costs no more than this."""
FETCH_BYTES = 16 << 20
"""Largest number of bytes per request; more could overrun the server's buffer for this client."""
PAUSE_S = 0.05
"""Pause before recreating a consumer after an unexpected response (seconds)."""
UNSENT_ACKS = 10_000


class Delivery:
    """One message under lease. Exactly one of ``ack``, ``nak``, ``term`` ends the lease; ``in_progress`` extends it.

    None of these calls fails while the bus is down: the first three are sent on reconnect, ``in_progress`` is lost.
    Yet an acknowledgement proves nothing: the message may be delivered again, and its handler must recognize that.
    """

    __slots__ = ("_puller", "_reply", "data", "deliveries", "headers", "seq", "subject", "time")

    def __init__(self, puller: Puller, raw: Raw) -> None:
        message, info = from_consumer(raw)
        self._puller = puller
        self._reply = raw.reply
        self.subject: str = message.subject
        self.data: bytes = message.data
        self.headers: Mapping[str, str] = message.headers
        self.seq: int = message.seq
        self.time: float = message.time
        self.deliveries: int = info.deliveries
        """Number of times that the message was delivered, this delivery included."""

    async def ack(self) -> None:
        """Acknowledge success: the server does not deliver the message again, and a work queue deletes it."""
        await self._puller.answer(self._reply, b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Return the message for redelivery, to any consumer, after ``delay_s``."""
        body = b"-NAK" + (b' {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"")
        await self._puller.answer(self._reply, body)

    async def term(self) -> None:
        """Give up on the message: the server never delivers it again, although it was not processed."""
        await self._puller.answer(self._reply, b"+TERM")

    async def in_progress(self) -> None:
        """Renew the lease. The renewal is lost if the bus is down."""
        await self._puller.extend(self._reply)


class Puller:
    """Pulls the deliveries of a durable consumer. Made by ``Bus.pull``; several processes may share one durable
    name."""

    def __init__(self, connection: Connection, stream: str, config: dict[str, Any]) -> None:
        self._connection = connection
        self._stream = stream
        self._config = config
        self._inbox: Subscription | None = None
        self._buffer: deque[Delivery] = deque()
        self._wake = asyncio.Event()
        self._open = False  # a request is outstanding
        self._missing = False  # the consumer is not known to exist
        self._wanted = 0  # messages that the open request may still deliver
        self._requests = 0
        self._unsent: deque[tuple[str, bytes]] = deque(maxlen=UNSENT_ACKS)
        self._watch = connection.inboxes.attach(self)

    async def __aenter__(self) -> Puller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, *, deadline_s: float) -> None:
        """Create or update the consumer on the server."""
        await create_consumer(self._connection, self._stream, self._config, deadline_s=deadline_s)
        self._inbox = await self._connection.subscribe(
            self._connection.inboxes.new() + ".*", self._on_message, confirm=False
        )

    async def fetch(self, n: int, wait_s: float) -> list[Delivery]:
        """Return up to ``n`` deliveries: wait up to ``wait_s`` for the first, then add the deliveries that are
        available at once.

        Returns an empty list if there is no work or the bus is down for that long; it heals by itself.

        Raises:
            Unavailable: the bus was closed.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not self._buffer:
            left = end - loop.time()
            if left <= 0 and self._open:
                break
            try:
                await self._request(n, max(left, 0.0))
            except Unavailable as error:
                if self._connection.closed or self._inbox is None:
                    raise
                log.debug("pull from %s: %s", self._stream, error)
                if loop.time() >= end:
                    break
                continue
            await self._wait_for_answer(max(min(end - loop.time(), EXPIRES_S), 0.0) + 0.5)
            if loop.time() >= end:
                break
        return [self._buffer.popleft() for _ in range(min(n, len(self._buffer)))]

    async def close(self) -> None:
        """Stop pulling. Deliveries that arrived, but that ``fetch`` did not return, go back to the queue at once. The
        durable consumer stays."""
        self._connection.inboxes.detach(self._watch)
        inbox, self._inbox = self._inbox, None
        if inbox is None:
            return
        await inbox.close()
        while self._buffer:
            await self._buffer.popleft().nak()

    async def answer(self, reply: str, body: bytes) -> None:
        """Send an acknowledgement; while the bus is down, store it and send it after the reconnect."""
        try:
            await self._flush_unsent()
            await self._connection.send(reply, body)
        except Unavailable:
            self._unsent.append((reply, body))

    async def extend(self, reply: str) -> None:
        """Extend a lease if the bus is up."""
        try:
            await self._flush_unsent()
            await self._connection.send(reply, b"+WPI")
        except Unavailable as error:
            log.debug("lease not extended: %s", error)

    def deliver(self, message: Raw) -> None:
        """Ignore a message: this inbox is registered only so that the connection can call ``lost``."""

    def lost(self, error: Lost) -> None:
        """Handle a broken connection: the request is lost, leases and the durable consumer remain."""
        self._open = False
        self._wake.set()

    async def _request(self, n: int, left_s: float) -> None:
        await self._connection.wait_connected(max(left_s, 0.001))
        if self._inbox is None:
            raise Unavailable(f"the puller of {self._stream} is closed")
        await self._flush_unsent()
        if self._missing:
            await asyncio.sleep(PAUSE_S)
            await create_consumer(self._connection, self._stream, self._config, deadline_s=max(left_s, 0.5))
            self._missing = False
        if self._open:
            return
        # "no_wait" with "expires": wait for the first message, then send what is there and end with a 404.
        body: dict[str, Any] = {"batch": n, "max_bytes": FETCH_BYTES, "no_wait": True}
        if left_s > 0.001:
            body["expires"] = int(min(left_s, EXPIRES_S) * 1e9)
        endpoint = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._config['name']}"
        self._wake.clear()
        self._requests += 1
        self._open, self._wanted = True, n
        try:
            await self._connection.send(endpoint, msgspec.json.encode(body), reply=self._reply_to())
        except Unavailable:
            self._open = False
            raise

    def _reply_to(self) -> str:
        """Return the reply subject of the newest request. It differs for each request, so that a late status of an
        earlier request does not end the newest one."""
        prefix = self._inbox.subject.removesuffix("*") if self._inbox is not None else ""
        return f"{prefix}{self._requests}"

    async def _wait_for_answer(self, timeout_s: float) -> None:
        """Wait until the open request has ended, for at most ``timeout_s``; the buffer then holds its messages."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._open:
                    await self._wake.wait()
                    self._wake.clear()
        except TimeoutError:
            self._open = False  # the server lost the request

    async def _on_message(self, raw: Raw) -> None:
        headers = raw.headers or {}
        if "Status" not in headers:
            self._buffer.append(Delivery(self, raw))
            self._wanted -= 1
            self._open = self._open and self._wanted > 0
        elif raw.subject == self._reply_to():
            self._open = False
            self._missing = not ended_well(headers["Status"], headers.get("Description", ""))
        self._wake.set()

    async def _flush_unsent(self) -> None:
        while self._unsent and self._connection.connected:
            reply, body = self._unsent[0]
            await self._connection.send(reply, body)
            self._unsent.popleft()
