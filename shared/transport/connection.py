"""Self-healing NATS connection. The only module that imports nats.

Every (re)connect uses a fresh client of nats-py with its own reconnect logic switched off, because that logic keeps
unsent messages, waits for a dead peer to accept them, and ends permanently on a protocol error. Whatever ends the
client's read loop (end of file, a reset, missed pongs, a server that refuses) has one effect here: pending requests
fail at once, the socket is aborted, and new clients connect until ``close``.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import nats.errors
from nats.aio.client import Client

from penstock.shared.errors import ConfigError, ProtocolError, Unavailable
from penstock.shared.transport.inbox import Inboxes, Lost, Raw, Reply

__all__ = ["Connection", "NoAnswer", "NoResponders", "Subscription", "redact"]

log = logging.getLogger(__name__)

DIAL_S = 2.0
"""Time limit of one attempt to connect (seconds)."""
RETRY_S = 0.2
"""Pause between two attempts (seconds)."""
REMIND_S = 10.0
"""Interval of warnings while the server is unreachable (seconds)."""
PING_S = 1.0
"""Interval of pings (seconds). Two unanswered pings end a connection: a silent cut is noticed within three seconds."""
LEAVE_S = 8.0
"""Time without a JetStream response (seconds) after which the client moves to another node of the cluster, because
its node may be cut off. Longer than the election of a leader, during which changing the node would not help."""
USER_TIMEOUT_MS = 3000
"""Age of unacknowledged bytes (milliseconds) that ends the connection; pings alone do not detect a dead peer while
bytes wait in the send buffer."""
REFUSED = "permissions violation"
"""Text in the server's error for a subject that a user may not publish or subscribe to."""
PENDING_BYTES = 64 << 20
"""Limit of nats-py's send buffer (bytes). A publish above the limit would block and swallow cancellation, so the limit
is far above the bytes that callers have in flight."""


class NoResponders(Unavailable):
    """No process listens on the subject."""


class NoAnswer(Unavailable):
    """No process answered in time, although a process may listen on the subject."""


Callback = Callable[[Raw], Awaitable[None]]


class Subscription:
    """Subscription that survives reconnects. ``close`` ends it."""

    def __init__(self, owner: Connection, subject: str, queue: str, callback: Callback) -> None:
        self.subject = subject
        self.queue = queue
        self.callback = callback
        self.handle: Any = None
        self._owner = owner

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop receiving; undelivered messages are discarded."""
        await self._owner.unsubscribe(self)


def redact(url: str) -> str:
    """Return ``url`` (or a comma-separated list) without user names, passwords and tokens."""
    parts = []
    for one in url.split(","):
        split = urlsplit(one.strip())
        parts.append(urlunsplit(split._replace(netloc=split.netloc.rpartition("@")[2])))
    return ",".join(parts)


def _user_of(url: str) -> str:
    """Return the user name in ``url``; '' if it has no user, or a token instead of user and password."""
    split = urlsplit(url)
    return split.username if split.username and split.password else ""


class Connection:
    """Self-healing NATS connection. Create it with ``open``; end it with ``close``."""

    def __init__(self, url: str, name: str, tls: ssl.SSLContext | None = None) -> None:
        self.url, self.tls, self.where = url, tls, redact(url)
        self.server_version: tuple[int, ...] = (0, 0, 0)
        self.max_payload = 1 << 20
        self.reconnects = 0
        self._servers = [one.strip() for one in url.split(",")]
        random.shuffle(self._servers)  # spread clients over the nodes of a cluster
        self._doubted: float | None = None
        self._name = name
        self._client: Any = None
        self._up = asyncio.Event()
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._subscriptions: list[Subscription] = []
        self.inboxes = Inboxes(_user_of(self._servers[0]))

    @classmethod
    async def open(cls, url: str, *, name: str, deadline_s: float, tls: ssl.SSLContext | None = None) -> Connection:
        """Connect to one of the servers in ``url`` (comma-separated).

        Raises:
            Unavailable: no server answered within ``deadline_s``; the message has the address without credentials.
            ConfigError: the server rejects the credentials, or the address is invalid.
        """
        self = cls(url, name, tls)
        await self.subscribe(self.inboxes.prefix + ".*", self.inboxes.dispatch)
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            try:
                client = await self._dial(min(DIAL_S, max(end - loop.time(), 0.05)))
                break
            except asyncio.CancelledError:
                if self._client is not None:  # the client was connected nevertheless
                    await self._discard(self._client, 0.5)
                raise
            except Unavailable as error:
                if loop.time() + RETRY_S >= end:
                    raise Unavailable(
                        f"cannot reach NATS at {self.where} within {deadline_s:g} s: {error}; "
                        "is the server running and PENSTOCK_NATS_URL right?"
                    ) from None
            await asyncio.sleep(RETRY_S)
        self._supervisor = asyncio.create_task(self._supervise(client), name=f"bus {name}")
        return self

    @property
    def connected(self) -> bool:
        """True if messages can be sent now."""
        return self._up.is_set() and bool(self._client.is_connected)

    @property
    def closed(self) -> bool:
        """True if ``close`` was called."""
        return self._closing

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait until the connection is up.

        Raises:
            Unavailable: still not connected after ``timeout_s``, or closed.
        """
        if self.connected:
            return
        try:
            async with asyncio.timeout(timeout_s):
                while not self.connected and not self._closing:
                    await self._up.wait()
                    if not self.connected:  # the client is dead, and its supervisor will notice soon
                        await asyncio.sleep(0.005)
        except TimeoutError:
            raise Unavailable(f"not connected to NATS at {self.where} (waited {timeout_s:g} s)") from None
        if self._closing:
            raise Unavailable(f"the connection to NATS at {self.where} is closed")

    async def send(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Write one message to the socket. At most once: delivery is not confirmed.

        Raises:
            Unavailable: not connected; nothing is buffered.
            ProtocolError: larger than the server's limit, or not a legal subject or header.
        """
        if not self.connected:
            raise Unavailable(f"not connected to NATS at {self.where}; '{subject}' was not sent")
        size = len(data) + sum(len(f"{key}: {value}\r\n".encode()) for key, value in (headers or {}).items()) + 12
        if size > self.max_payload:  # the server would close the connection instead of refusing the message
            raise ProtocolError(f"{size} bytes on '{subject}' exceed the server's max_payload {self.max_payload}")
        try:
            await self._client.publish(subject, data, reply=reply, headers=headers)
        except (nats.errors.MaxPayloadError, nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise ProtocolError(f"cannot publish {len(data)} bytes on '{subject}': {error}") from None
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"'{subject}' was not sent to NATS at {self.where}: {error}") from None

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Raw:
        """Send a message and wait for one reply.

        Raises:
            NoResponders: no process listens on ``subject``.
            NoAnswer: no reply within ``timeout_s``.
            Lost: the connection broke before the reply.
            Unavailable: not connected.
            ProtocolError: the payload or subject is not legal.
        """
        future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        inbox = self.inboxes.attach(Reply(future))
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(subject, data, reply=inbox, headers=headers)
                message = await future
        except TimeoutError:
            raise NoAnswer(f"no answer on '{subject}' within {timeout_s:.3g} s") from None
        finally:
            self.inboxes.detach(inbox)
            if future.done() and not future.cancelled():
                future.exception()  # mark the exception as retrieved
        if message.headers and message.headers.get("Status") == "503":
            raise NoResponders(f"nobody answers on '{subject}'")
        return message

    def trust(self) -> None:
        """Record that JetStream answered through the connected NATS server; see ``doubt``."""
        self._doubted = None

    def doubt(self) -> None:
        """Record that JetStream did not answer through the connected NATS server. After LEAVE_S without an answer,
        connect to the next server, if there is one."""
        now = time.monotonic()
        self._doubted = now if self._doubted is None else self._doubted
        if len(self._servers) < 2 or now - self._doubted < LEAVE_S or not self.connected:
            return
        log.warning("JetStream gives no answer by way of this node for %g s: trying another of %s", LEAVE_S, self.where)
        self._doubted = None
        self._next_server()
        writer = getattr(self._client._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()  # ends the read loop, after which the supervisor dials again

    def _next_server(self) -> None:
        self._servers = [*self._servers[1:], self._servers[0]]

    async def subscribe(
        self, subject: str, callback: Callback, *, queue: str = "", confirm: bool = True
    ) -> Subscription:
        """Call ``callback``, which must be quick, for each message, one after another. Survives reconnects.

        With ``confirm``, return once the server has registered the subscription (while disconnected: at once; the
        reconnect registers it).
        """
        entry = Subscription(self, subject, queue, callback)
        self._subscriptions.append(entry)
        if self.connected:
            try:
                await self._subscribe_on(self._client, entry)
                if confirm:
                    await self.echo(DIAL_S)
            except (nats.errors.BadSubjectError, ValueError) as error:
                self._subscriptions.remove(entry)
                raise ProtocolError(f"cannot subscribe to '{subject}': {error}") from None
            except (nats.errors.Error, OSError, Unavailable) as error:
                log.debug("subscription to %s waits for the next connection: %s", subject, error)
        return entry

    async def unsubscribe(self, entry: Subscription) -> None:
        """End a subscription made by ``subscribe``. Idempotent."""
        if entry not in self._subscriptions:
            return
        self._subscriptions.remove(entry)
        if entry.handle is not None and self.connected:
            try:
                await entry.handle.unsubscribe()
            except (nats.errors.Error, OSError) as error:
                log.debug("unsubscribe from %s: %s", entry.subject, error)

    async def echo(self, timeout_s: float) -> float:
        """Send a message from this client to itself and return the seconds until it arrives, which proves that server,
        read loop and subscription work.

        nats-py's own rtt and flush are not used: a pong that arrives after their timeout kills the read loop.
        """
        start = time.perf_counter()  # uvloop's clock ticks in milliseconds
        try:
            async with asyncio.timeout(timeout_s):
                await self._round_trip(self.send)
        except TimeoutError:
            raise Unavailable(f"NATS at {self.where} did not answer within {timeout_s:g} s") from None
        return time.perf_counter() - start

    async def close(self, deadline_s: float) -> None:
        """Flush, for at most ``deadline_s``, and close. Pending requests fail."""
        if self._closing:
            return
        if self.connected:
            try:
                await self.echo(deadline_s)  # nats-py's close discards what the socket has not accepted yet
            except Unavailable as error:
                log.warning("closing the connection to %s: what was sent last may be lost: %s", self.where, error)
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._up.set()
        self.inboxes.fail(Lost(f"the connection to NATS at {self.where} was closed"))
        if self._client is not None:
            await self._discard(self._client, deadline_s)

    async def _subscribe_on(self, client: Any, entry: Subscription) -> None:
        # A limit of 0 bytes means unlimited: readers bound the bytes that they request, and a dropped reply would be a
        # hang.
        entry.handle = await client.subscribe(
            entry.subject, queue=entry.queue, cb=entry.callback, pending_bytes_limit=0 if not entry.queue else 256 << 20
        )

    async def _round_trip(self, send: Callable[[str, bytes], Awaitable[None]]) -> None:
        future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        inbox = self.inboxes.attach(Reply(future))
        try:
            await send(inbox, b"")
            await future
        finally:
            self.inboxes.detach(inbox)
            if future.done() and not future.cancelled():
                future.exception()  # mark the exception as retrieved

    async def _dial(self, timeout_s: float) -> Any:
        try:
            return await self._connect(timeout_s)
        finally:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # nats-py uses ``wait_for``, which lost it before Python 3.12
                raise asyncio.CancelledError

    async def _connect(self, timeout_s: float) -> Any:
        client = Client()
        seen: list[Exception] = []

        async def on_error(error: Exception) -> None:  # must never raise: that would end the read loop
            if isinstance(error, nats.errors.SlowConsumerError):
                log.warning("messages dropped: the handler of '%s' is too slow", error.subject)
            elif isinstance(error, nats.errors.Error) and REFUSED in str(error).lower():
                log.error("NATS does not allow the user of this service what it asked for: %s", error)
            elif isinstance(error, OSError | nats.errors.Error):
                seen[:] = [error]
                log.debug("nats: %r", error)
            else:
                log.error("the handler of a subscription raised", exc_info=error)

        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=self._servers,
                    dont_randomize=True,
                    name=self._name,
                    tls=self.tls,
                    error_cb=on_error,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.02,
                    connect_timeout=max(timeout_s, 0.05),
                    ping_interval=PING_S,
                    max_outstanding_pings=2,
                    pending_size=PENDING_BYTES,
                    no_echo=False,
                )
                self._tune(client)
                done: set[Subscription] = set()
                while missing := [entry for entry in self._subscriptions if entry not in done]:  # may have grown
                    for entry in missing:
                        await self._subscribe_on(client, entry)
                        done.add(entry)
                    await self._round_trip(client.publish)  # then the server has registered them
        except (OSError, nats.errors.Error, Unavailable, TimeoutError) as error:
            await self._discard(client, 0.5)
            self._next_server()  # the first server may accept connections and never answer
            raise self._refusal(error, seen[-1] if seen else error) from None
        except asyncio.CancelledError:  # no other code references this client
            await self._discard(client, 0.5)
            raise
        except ValueError as error:
            raise ConfigError(f"'{self.where}' is not a NATS address: {error}") from None
        version = client.connected_server_version
        self.server_version = (version.major, version.minor, version.patch)
        self.max_payload = client.max_payload
        self._client = client
        self._up.set()
        return client

    def _refusal(self, error: Exception, cause: Exception) -> ConfigError | Unavailable:
        """Return the error to raise for a failed attempt to connect."""
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigError(f"NATS at {self.where} cannot prove who it is: {cause}; see PENSTOCK_NATS_TLS_CA")
        if "authorization" in f"{error} {cause}".lower():
            return ConfigError(f"NATS at {self.where} refuses the credentials in its URL")
        if "connect url" in str(error):
            return ConfigError(f"'{self.where}' is not a NATS address: {error}")
        return Unavailable(str(cause) or type(cause).__name__)

    def _tune(self, client: Any) -> None:
        writer = getattr(client._transport, "_io_writer", None)
        if writer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)

    async def _supervise(self, client: Any) -> None:
        while True:
            await asyncio.wait([client._reading_task])
            self._up.clear()
            log.warning("connection to NATS at %s lost; reconnecting", self.where)
            self.inboxes.fail(Lost(f"the connection to NATS at {self.where} broke before the answer came"))
            await self._discard(client, 0.5)
            client = await self._redial()
            self.reconnects += 1
            log.warning("reconnected to NATS at %s", self.where)

    async def _redial(self) -> Any:
        reminded = time.monotonic()
        while True:
            try:
                return await self._dial(DIAL_S)
            except (Unavailable, ConfigError) as error:
                if time.monotonic() - reminded > REMIND_S:
                    reminded = time.monotonic()
                    log.warning("still not connected to NATS at %s: %s", self.where, error)
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))

    async def _discard(self, client: Any, deadline_s: float) -> None:
        """Close a client in any state: flush if possible, then abort the socket and its tasks."""
        try:
            async with asyncio.timeout(deadline_s):
                if client._reading_task is not None and not client._reading_task.done():
                    await client.close()
        except (OSError, nats.errors.Error, TimeoutError) as error:
            log.debug("closing the connection to %s: %s", self.where, error)
        client._pending, client._pending_data_size = [], 0
        writer = getattr(client._transport, "_io_writer", None)
        if writer is not None and not (writer.transport.is_closing() and not writer.transport.get_write_buffer_size()):
            writer.transport.abort()
        tasks = [client._reading_task, client._ping_interval_task, client._flusher_task]
        tasks += [sub._wait_for_msgs_task for sub in client._subs.values()]
        live = [task for task in tasks if task is not None and not task.done()]
        for task in live:
            task.cancel()
        if live:
            await asyncio.wait(live, timeout=0.5)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the next round of the loop
        client._status = Client.CLOSED
