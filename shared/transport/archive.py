"""Backup of whole streams as bytes: JetStream's own snapshots, which preserve stream sequence numbers, headers and
times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from penstock.shared.errors import ConfigError, DeadlineError, ProtocolError, Unavailable
from penstock.shared.transport.connection import Connection
from penstock.shared.transport.inbox import Raw
from penstock.shared.transport.jetstream import ApiError, Code, call, raise_error

__all__ = ["CHUNK_BYTES", "StreamImage", "load_stream", "save_stream"]

CHUNK_BYTES = 512 << 10
SILENCE_S = 30.0
"""Longest wait for the next part of a stream (seconds), however large the whole stream is."""


class StreamImage(msgspec.Struct, frozen=True):
    """Configuration and state of a saved stream, as the server reports them. A restore changes only the number of
    replicas."""

    name: str
    config: dict[str, Any]
    state: dict[str, Any]

    @property
    def last_seq(self) -> int:
        """Stream sequence number of the newest message ever stored."""
        return int(self.state["last_seq"])

    @property
    def messages(self) -> int:
        """Number of messages."""
        return int(self.state["messages"])


class _Parts:
    """Receiver of a stream snapshot's parts. ``save_stream`` yields them, and acknowledges a part to the server once
    the caller asks for the next one."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Raw] = asyncio.Queue()  # bounded by the server, which waits for acknowledgements

    async def on_message(self, raw: Raw) -> None:
        """Queue a part of the snapshot for ``save_stream``."""
        self.queue.put_nowait(raw)


async def save_stream(connection: Connection, stream: str) -> AsyncGenerator[StreamImage | bytes, None]:
    """Yield the ``StreamImage`` of a stream (its configuration and state), then the bytes of its snapshot in parts.

    Raises:
        NotFound: no such stream.
        DeadlineError: the server stopped sending.
        Unavailable: the stream cannot be saved; the message has the cause.
    """
    parts = _Parts()
    async with await connection.subscribe(connection.inboxes.new(), parts.on_message) as inbox:
        body = {"deliver_subject": inbox.subject, "no_consumers": True, "chunk_size": CHUNK_BYTES}
        what = f"snapshot of stream {stream}"
        answer = await call(connection, f"STREAM.SNAPSHOT.{stream}", body, deadline_s=SILENCE_S, what=what)
        yield StreamImage(stream, answer["config"], answer["state"])
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    raw = await parts.queue.get()
            except TimeoutError:
                raise DeadlineError(f"{what}: the server sent nothing for {SILENCE_S:g} s") from None
            if raw.headers and raw.headers.get("Status") not in (None, "", "200", "204"):
                raise Unavailable(f"{what}: {raw.headers.get('Description') or raw.headers['Status']}")
            if not raw.data:
                return
            yield raw.data
            if raw.reply:
                await connection.send(raw.reply, b"")


async def load_stream(connection: Connection, image: StreamImage, parts: Iterator[bytes]) -> StreamImage:
    """Restore a stream from an image and its parts; return the new state. The stream must not exist yet.

    The restored stream has one replica, because the new bus may be a single server. Services raise the number when
    they start.

    Raises:
        ConfigError: a stream of this name exists, or the server has no room for it.
        Unavailable: the server rejects the image; the message has the cause.
    """
    what = f"restore stream {image.name}"
    body = {"config": image.config | {"num_replicas": 1}, "state": image.state}
    try:
        answer = await call(connection, f"STREAM.RESTORE.{image.name}", body, deadline_s=SILENCE_S, what=what)
    except ApiError as error:
        if error.code in (Code.STREAM_EXISTS, Code.RESTORE_EXISTS):
            raise ConfigError(f"{what}: it exists there; restore into an empty store") from None
        raise ConfigError(str(error)) from None
    subject = answer["deliver_subject"]
    while part := await asyncio.to_thread(next, parts, b""):
        reply = await connection.request(subject, part, timeout_s=SILENCE_S)
        if reply.data:
            _checked(reply.data, what)
    made = _checked((await connection.request(subject, b"", timeout_s=SILENCE_S)).data, what)
    return StreamImage(image.name, made["config"], made["state"])


def _checked(data: bytes, what: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{what}: the server's answer does not decode: {error}") from None
    if "error" in answer:
        raise_error(answer["error"], what)
    return answer
