"""Message bus: all communication between services, and all durable messages.

One ``Bus`` per process. It reconnects by itself. While it is disconnected, durable operations wait up to a deadline,
and others fail at once. All access to NATS goes through this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.shared.errors import NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import ClockSample, clock_skew_s, set_bus_clock
from penstock.shared.protocol.parts import part_subject
from penstock.shared.transport import archive, streams
from penstock.shared.transport import read as reading
from penstock.shared.transport.archive import StreamImage
from penstock.shared.transport.connection import Connection, NoResponders, Subscription
from penstock.shared.transport.follow import Reader
from penstock.shared.transport.inbox import Raw
from penstock.shared.transport.jetstream import ApiError, Code, call
from penstock.shared.transport.kv import Entry, KeyValue
from penstock.shared.transport.message import MSG_ID, Message, Outgoing, unix_time
from penstock.shared.transport.publish import Publisher
from penstock.shared.transport.pull import Delivery, Puller
from penstock.shared.transport.serve import Server, answer_of

__all__ = [
    "MSG_ID",
    "Bus",
    "ConsumerState",
    "Delivery",
    "Entry",
    "KeyValue",
    "Message",
    "Outgoing",
    "Puller",
    "Reader",
    "StreamImage",
    "StreamState",
    "Subscription",
]


@dataclass(frozen=True, slots=True)
class StreamState:
    """State of a stream. ``bytes`` includes the server's overhead; ``max_bytes`` is -1 without a limit; ``created``
    (RFC 3339) distinguishes the stream from an earlier stream of the same name; ``atomic``: the stream stores the parts
    of a payload atomically."""

    messages: int
    bytes: int
    max_bytes: int
    first_seq: int
    last_seq: int
    created: str
    atomic: bool


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """State of a durable consumer: ``pending`` messages are not delivered yet, ``ack_pending`` are delivered but not
    acknowledged, ``redelivered`` were delivered more than once.

    ``delivered_seq`` is the highest stream sequence number ever delivered; ``max_deliver`` and ``ack_wait_s`` are
    settings.
    """

    pending: int
    ack_pending: int
    redelivered: int
    delivered_seq: int
    max_deliver: int
    ack_wait_s: float


log = logging.getLogger(__name__)

CLOCK_SAMPLES = 3
"""Number of requests per measurement of the server's clock, of which only the fastest is used."""


class Bus:
    """Connection to NATS with the operations that Penstock needs. Use ``async with await Bus.connect(...)``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._publisher = Publisher(connection)
        self._servers: set[Server] = set()
        self._held_until = 0.0

    @classmethod
    async def connect(cls, url: str, *, name: str, deadline_s: float = 10.0, tls: ssl.SSLContext | None = None) -> Bus:
        """Connect to ``url`` (or several, comma-separated); ``name`` is shown in NATS's monitoring.

        ``tls``: context of the connection (``ServiceSettings.nats_tls``); None: the scheme of ``url`` decides.

        Raises:
            Unavailable: not reachable within the deadline; the message has the address without credentials.
            ConfigError: the address is invalid, or the credentials are rejected.
        """
        return cls(await Connection.open(url, name=name, deadline_s=deadline_s, tls=tls))

    async def another(self, *, name: str, deadline_s: float = 10.0) -> Bus:
        """Open a separate connection to the same server. Another thread may call this function, to get a connection for
        its own event loop.

        Raises: as ``connect``.
        """
        return await Bus.connect(self._connection.url, name=name, deadline_s=deadline_s, tls=self._connection.tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def hold(self, seconds: float) -> None:
        """Set ``held`` to True for ``seconds`` from now on, so that a backup can read all messages; 0 ends the hold."""
        self._held_until = time.monotonic() + seconds

    @property
    def held(self) -> bool:
        """True if a backup is reading the streams; code that frees space must then delete no messages. ``purge`` does
        not check this property, so its callers must."""
        return time.monotonic() < self._held_until

    @property
    def connected(self) -> bool:
        """True if messages can be sent now."""
        return self._connection.connected

    @property
    def reconnects(self) -> int:
        """Number of times that the connection was re-established."""
        return self._connection.reconnects

    async def wait_connected(self, deadline_s: float) -> None:
        """Wait until connected. Raises Unavailable at the deadline."""
        await self._connection.wait_connected(deadline_s)

    async def rtt(self, *, deadline_s: float = 2.0) -> float:
        """Return the round-trip time to the server (seconds). Raises Unavailable."""
        return await self._connection.echo(deadline_s)

    async def measure_clock(self, *, deadline_s: float = 2.0) -> float | None:
        """Measure the server's clock and use it as bus time; return by how many seconds this host's clock is ahead.

        Returns None for a server that does not report its time (before 2.10): bus time stays as it was. In a cluster,
        the node that stamps the tickets is measured.

        Raises:
            NotFound: no stream of tickets yet.
            Unavailable: no answer until the deadline.
        """
        samples = []
        for _ in range(CLOCK_SAMPLES):
            wall, asked = time.time(), time.monotonic()
            what = "the time of the server"
            info = await call(
                self._connection, f"STREAM.INFO.{subjects.TICKETS}", deadline_s=deadline_s, what=what
            )  # fmt: skip
            if not (text := info.get("ts")):
                return None
            samples.append(ClockSample(wall, asked, time.monotonic(), unix_time(text)))
        set_bus_clock(min(samples, key=lambda sample: sample.round_trip_s))
        return clock_skew_s()

    async def close(self, deadline_s: float = 5.0) -> None:
        """Let handlers finish, flush, and disconnect. Idempotent."""
        servers, self._servers = self._servers, set()
        await asyncio.gather(*(server.close(deadline_s) for server in servers))
        await self._connection.close(deadline_s)

    # Streams

    async def ensure_streams(
        self,
        *,
        experience_bytes: int,
        stream_bytes: int,
        ledger_bytes: int | None = None,
        live_keep_s: float | None = None,
        audit_keep_s: float | None = None,
        replicas: int = 1,
        update: bool = True,
    ) -> None:
        """Create missing streams and buckets; with ``update``, also adapt existing streams to the arguments.
        Idempotent.

        In a cluster each stream and bucket gets ``replicas``; one that has more replicas keeps them.

        INTERACTIONS and FEEDBACK keep a message for ``live_keep_s``; None: until a client removes it. AUDIT keeps a
        message for ``audit_keep_s``, or until the stream needs the space. LEDGER has ``ledger_bytes``; None:
        ``stream_bytes``.

        Raises:
            ConfigError: the server has no room, or an existing stream cannot be changed.
        """
        await streams.ensure(
            self._connection, experience_bytes=experience_bytes, stream_bytes=stream_bytes, ledger_bytes=ledger_bytes,
            live_keep_s=live_keep_s, audit_keep_s=audit_keep_s, replicas=replicas, update=update,
        )  # fmt: skip

    async def missing_streams(self) -> list[str]:
        """Return the streams and buckets that do not exist yet. Raises Unavailable."""
        return await streams.missing(self._connection)

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        expect_last_subject_seq: int | None = None,
        deadline_s: float = 5.0,
    ) -> int:
        """Store a message durably; return its stream sequence number after the server's acknowledgement.

        Retries with the same message id until the deadline, so the message is stored once however often it was sent (on
        a work queue: unless it was consumed before a server restart). With ``expect_last_subject_seq`` the server
        stores the message only if this is the newest stream sequence number on the subject (0: none yet). A rejection
        counts as success if its cause is that an earlier attempt of the same call was stored.

        Raises:
            StreamFull: the stream's byte budget is used up.
            Conflict: another writer's message came first.
            Unavailable: no acknowledgement until the deadline; the message may or may not be stored.
            ProtocolError: more than 1 MiB, or not a legal subject or header.
        """
        return await self._publisher.publish(
            subject,
            data,
            headers=headers,
            msg_id=msg_id,
            expect_last_subject_seq=expect_last_subject_seq,
            deadline_s=deadline_s,
        )

    async def publish_many(self, messages: Sequence[Outgoing], *, deadline_s: float = 10.0) -> list[int]:
        """Store messages of one stream atomically (one batch of up to 1000); return their stream sequence numbers.

        If that is impossible (more messages, a server before 2.12.1), they are published singly and concurrently. Then
        a failed call may have stored only some of them; repeat it with the same ids to store the others.

        Raises: as ``publish``.
        """
        return await self._publisher.publish_many(messages, deadline_s=deadline_s)

    async def publish_whole(self, messages: Sequence[Outgoing], *, deadline_s: float = 10.0) -> None:
        """Store several payloads of one stream atomically. A payload above 1 MiB is split into parts, which
        ``get_whole`` joins.

        Raises: as ``publish``; ConfigError if the server cannot store parts atomically.
        """
        await self._publisher.publish_whole(messages, deadline_s=deadline_s)

    def follow(self, stream: str, subject: str, *, start_seq: int = 1, headers_only: bool = False) -> Reader:
        """Return a reader that yields the messages of ``subject`` (may contain wildcards) in order, from ``start_seq``
        on, and then waits for new ones.

        Survives reconnects and server restarts without gaps or repeats. End it with ``aclose``
        (``contextlib.aclosing``).
        """
        return Reader(self._connection, stream, subject, start_seq=start_seq, headers_only=headers_only)

    def scan(self, stream: str, subject: str, *, start_seq: int = 1, headers_only: bool = False) -> Reader:
        """Return a reader as ``follow`` does, but one that stops at the current end of the stream."""
        return Reader(self._connection, stream, subject, start_seq=start_seq, headers_only=headers_only, follow=False)

    async def read(
        self, stream: str, subject: str, *, start_seq: int = 1, end_seq: int | None = None, headers_only: bool = False
    ) -> list[Message]:
        """Return all stored messages of ``subject`` with stream sequence numbers from ``start_seq`` to ``end_seq``."""
        found: list[Message] = []
        async with contextlib.aclosing(self.scan(stream, subject, start_seq=start_seq, headers_only=headers_only)) as r:
            async for message in r:
                if end_seq is not None and message.seq > end_seq:
                    break
                found.append(message)
        return found

    async def walk(self, stream: str, subject: str, *, last_seq: int) -> list[Message]:
        """Return the messages of ``subject`` up to stream sequence number ``last_seq``. Request them one by one,
        because a work queue allows no second consumer of a subject."""
        found: list[Message] = []
        seq = 1
        while (message := await reading.first_at_or_after(self._connection, stream, subject, seq)) is not None:
            if message.seq > last_seq:
                break
            found.append(message)
            seq = message.seq + 1
        return found

    async def last(self, stream: str, subject: str) -> Message | None:
        """Return the newest message on ``subject``, or None."""
        return await reading.last(self._connection, stream, subject)

    async def get(self, stream: str, seq: int, *, deadline_s: float = 5.0) -> Message:
        """Return the message with stream sequence number ``seq``. Raises NotFound only if the stream's leader does not
        have it."""
        return await reading.get(self._connection, stream, seq, deadline_s=deadline_s)

    async def get_many(self, stream: str, seqs: Iterable[int], *, deadline_s: float = 10.0) -> dict[int, Message]:
        """Fetch messages by stream sequence number, concurrently. The result lacks the messages that the stream's
        leader does not have."""
        return await reading.get_many(self._connection, stream, seqs, deadline_s=deadline_s)

    async def get_whole(
        self, stream: str, seqs: Iterable[int], *, deadline_s: float = 10.0, direct: bool = True
    ) -> dict[int, Message]:
        """Fetch payloads by the stream sequence number of their first message, and join their parts. The result lacks
        incomplete payloads.

        With ``direct`` any replica answers, else the stream's leader. ``direct`` needs a permission that not every
        service has.
        """
        return await reading.get_whole(self._connection, stream, seqs, deadline_s=deadline_s, direct=direct)

    async def pull(
        self,
        stream: str,
        subject: str,
        durable: str,
        *,
        ack_wait_s: float,
        max_deliver: int = -1,
        max_ack_pending: int = 1000,
        deadline_s: float = 10.0,
    ) -> Puller:
        """Create or update a durable consumer, and return a puller of its messages; each delivered message is leased
        for ``ack_wait_s`` seconds.

        Raises:
            NotFound: no such stream.
            Unavailable: JetStream refuses (a work queue allows one consumer per subject), or does not answer.
        """
        config = {
            "name": durable,
            "durable_name": durable,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "ack_wait": int(ack_wait_s * 1e9),
            "max_deliver": max_deliver,
            "max_ack_pending": max_ack_pending,
            "filter_subject": subject,
        }
        puller = Puller(self._connection, stream, config)
        await puller.start(deadline_s=deadline_s)
        return puller

    async def delete_consumer(self, stream: str, durable: str) -> None:
        """Delete a durable consumer. Idempotent."""
        with contextlib.suppress(NotFound):
            await self._call(f"CONSUMER.DELETE.{stream}.{durable}", None, f"delete consumer '{durable}' of {stream}")

    async def delete_message(self, stream: str, seq: int) -> None:
        """Delete one message. Idempotent."""
        try:
            await self._call(f"STREAM.MSG.DELETE.{stream}", {"seq": seq}, f"delete message {seq} of {stream}")
        except NotFound:
            return
        except ApiError as error:
            if error.code not in (Code.MESSAGE_DELETE_FAILED, Code.SEQUENCE_NOT_FOUND):
                raise
            with contextlib.suppress(NotFound):
                await self.get(stream, seq)
                raise

    async def purge(self, stream: str, subject: str, *, below_seq: int | None = None) -> int:
        """Delete the messages of ``subject``, including all parts of large payloads, with stream sequence numbers below
        ``below_seq`` (None: all); return the number of deleted messages."""
        if below_seq is not None and below_seq <= 1:  # the server takes 0 as no limit
            return 0
        purged = 0
        for each in (subject, part_subject(subject)):
            body: dict[str, Any] = {"filter": each} | ({"seq": below_seq} if below_seq is not None else {})
            answer = await self._call(f"STREAM.PURGE.{stream}", body, f"purge '{each}' of {stream}")
            purged += int(answer["purged"])
        return purged

    async def stream_state(self, stream: str) -> StreamState:
        """Return the size and limits of a stream."""
        info = await self._call(f"STREAM.INFO.{stream}", None, f"state of {stream}")
        state = info["state"]
        return StreamState(
            state["messages"], state["bytes"], info["config"]["max_bytes"], state["first_seq"], state["last_seq"],
            info["created"], bool(info["config"].get("allow_atomic", False)),
        )  # fmt: skip

    async def subject_counts(self, stream: str, subject: str = ">") -> dict[str, int]:
        """Return the number of messages of each subject that matches the filter ``subject``."""
        counts: dict[str, int] = {}
        while True:
            body = {"subjects_filter": subject, "offset": len(counts)}
            info = await self._call(f"STREAM.INFO.{stream}", body, f"subjects of {stream}")
            page = info["state"].get("subjects") or {}
            counts.update(page)
            if not page or len(counts) >= info.get("total", 0):
                return counts

    async def consumer_state(self, stream: str, durable: str) -> ConsumerState:
        """Return the backlog of a durable consumer. Raises NotFound."""
        info = await self._call(f"CONSUMER.INFO.{stream}.{durable}", None, f"state of consumer '{durable}'")
        config = info["config"]
        return ConsumerState(
            info["num_pending"], info["num_ack_pending"], info["num_redelivered"], info["delivered"]["stream_seq"],
            config.get("max_deliver", -1), config["ack_wait"] / 1e9,
        )  # fmt: skip

    async def dead_letters(self, handler: Callable[[str, str, int], None]) -> Subscription:
        """Call ``handler(stream, consumer, stream_seq)`` when a message has been delivered the maximum number of times
        without an acknowledgement.

        Advisories may be lost: also compare ``consumer_state`` with the stream from time to time.
        """

        async def on_advisory(raw: Raw) -> None:
            advisory = msgspec.json.decode(raw.data)
            handler(advisory["stream"], advisory["consumer"], advisory["stream_seq"])

        return await self._connection.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>", on_advisory)

    def save_stream(self, stream: str) -> AsyncGenerator[StreamImage | bytes, None]:
        """Yield the ``StreamImage`` of a stream, then its snapshot in parts, as bytes: see ``archive.save_stream``."""
        return archive.save_stream(self._connection, stream)

    async def load_stream(self, image: StreamImage, parts: Iterator[bytes]) -> StreamImage:
        """Restore a stream from the output of ``save_stream``: see ``archive.load_stream``."""
        return await archive.load_stream(self._connection, image, parts)

    async def streams(self) -> list[str]:
        """Return the names of existing streams; the name of a bucket's stream begins with ``KV_``."""
        names: list[str] = []
        while True:
            answer = await self._call("STREAM.NAMES", {"offset": len(names)}, "names of the streams")
            names += answer.get("streams") or []
            if not answer.get("streams") or len(names) >= answer["total"]:
                return sorted(names)

    def kv(self, bucket: str) -> KeyValue:
        """Return a key-value bucket created by ``ensure_streams``."""
        return KeyValue(self._connection, self._publisher, bucket)

    # Core: at most once

    async def notify(self, subject: str, data: bytes) -> None:
        """Send ``data`` to the current subscribers of ``subject``, without storage. Raises Unavailable while
        disconnected."""
        await self._connection.send(subject, data)

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], None]) -> Subscription:
        """Call ``handler(subject, data)``, which must be quick, for each notification. Survives reconnects."""

        async def on_message(raw: Raw) -> None:
            handler(raw.subject, raw.data)

        return await self._connection.subscribe(subject, on_message)

    async def request(self, subject: str, data: bytes, *, deadline_s: float) -> bytes:
        """Send a request to a server of ``subject`` and return its reply.

        Raises:
            Unavailable: no server, or no reply until the deadline. The request may have been executed.
            PenstockError: raised by the handler, with its class.
        """
        try:
            raw = await self._connection.request(subject, data, timeout_s=deadline_s)
        except NoResponders:
            raise NoResponders(f"nobody serves '{subject}'") from None
        return answer_of(raw)

    async def serve(
        self, subject: str, handler: Callable[[bytes], Awaitable[bytes]], *, queue: str = "", max_concurrent: int = 64
    ) -> Server:
        """Answer requests on ``subject`` by ``handler``; servers with the same ``queue`` share the requests.

        A PenstockError raised by the handler is raised at the requester; any other exception is logged here and reaches
        the requester as a PenstockError. Beyond ``max_concurrent``, requests wait.
        """
        server = Server(self._connection, subject, handler, max_concurrent)
        await server.start(queue)
        self._servers.add(server)
        server.on_close = self._servers.discard
        return server

    async def _call(self, endpoint: str, body: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
        return await call(self._connection, endpoint, body, deadline_s=5.0, what=what)
