"""Durable publishing: a stream sequence number is returned only after the server stored the message."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from penstock.shared.errors import ConfigError, Conflict, ProtocolError, StreamFull, Unavailable
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.parts import MAX_PARTS
from penstock.shared.transport.connection import Connection, NoAnswer, NoResponders
from penstock.shared.transport.jetstream import CONFLICTS, ApiError, Code, raise_error, retry_until
from penstock.shared.transport.message import MSG_ID, Outgoing
from penstock.shared.transport.parts import cut
from penstock.shared.transport.read import first_at_or_after

__all__ = ["Publisher"]

WINDOW = 256
"""Largest number of unacknowledged publishes of one process."""
ATOMIC_SINCE = (2, 12, 1)
"""First server version whose atomic batches respect message ids."""
FLUSH_BYTES = 8 << 20
"""Bytes of a batch sent before the server must confirm that it received them, which keeps the send buffer small."""
SLOWEST_BYTES_PER_S = 16 << 20
"""Throughput (bytes per second) assumed for the timeout of a batch, so that large ones get more time."""


class Publisher:
    """Publishes to streams with retries and de-duplication, and with a limited number of messages in flight."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._window = asyncio.Semaphore(WINDOW)

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None,
        msg_id: str | None,
        expect_last_subject_seq: int | None,
        deadline_s: float,
    ) -> int:
        """See ``Bus.publish``."""
        check_size(subject, data)
        msg_id = msg_id or secrets.token_hex(12)
        sent = {**(headers or {}), MSG_ID: msg_id}
        if expect_last_subject_seq is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(expect_last_subject_seq)
        attempts = retry_until(self._connection, deadline_s, f"publish on '{subject}'")
        async with self._window:
            async for timeout_s in attempts:
                try:
                    answer = await self._put(subject, data, sent, timeout_s)
                    return int(answer["seq"])
                except (Conflict, StreamFull) as error:
                    if isinstance(error, StreamFull) or expect_last_subject_seq is None:
                        raise
                    return await self._resolve(subject, msg_id, expect_last_subject_seq, error)
                except Unavailable as error:
                    attempts.why = _hint(subject, error)
        raise AssertionError("retry_until ends by raising")

    async def publish_whole(self, messages: Sequence[Outgoing], *, deadline_s: float) -> None:
        """See ``Bus.publish_whole``."""
        named = [part for message in messages for part in cut(_named(message))]
        if len(named) == len(messages):
            await self.publish_many(named, deadline_s=deadline_s)
            return
        what = f"{len(messages)} payloads on '{messages[0].subject}' in {len(named)} parts"
        if len(named) > MAX_PARTS:
            raise ProtocolError(f"{what} are more than one atomic batch holds ({MAX_PARTS})")
        if self._connection.server_version < ATOMIC_SINCE:
            raise ConfigError(f"{what} need a NATS server from {'.'.join(map(str, ATOMIC_SINCE))} on")
        await self._publish_batch(named, deadline_s, parts=True)

    async def publish_many(self, messages: Sequence[Outgoing], *, deadline_s: float) -> list[int]:
        """See ``Bus.publish_many``."""
        for message in messages:
            check_size(message.subject, message.data)
        named = [_named(message) for message in messages]
        if 1 < len(named) <= MAX_PARTS and self._connection.server_version >= ATOMIC_SINCE:
            seqs = await self._publish_batch(named, deadline_s)
            if seqs is not None:
                return seqs
        singles = [
            self.publish(
                m.subject,
                m.data,
                headers=m.headers,
                msg_id=m.msg_id,
                expect_last_subject_seq=None,
                deadline_s=deadline_s,
            )
            for m in named
        ]
        results = await asyncio.gather(*singles, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, int)]

    async def _publish_batch(
        self, messages: list[Outgoing], deadline_s: float, *, parts: bool = False
    ) -> list[int] | None:
        """Publish one atomic batch and return its stream sequence numbers. Return None if the caller must publish the
        messages one by one.

        None means that the stream does not allow batches, or that it has stored a message id before. In the second case
        an earlier attempt was stored as a whole, and publishing the messages one by one returns their stream sequence
        numbers. With ``parts`` the messages are parts of payloads, which are never published one by one: then a stream
        without batches is an error, and None means that all parts are stored.
        """
        attempts = retry_until(self._connection, deadline_s, f"publish {len(messages)} on '{messages[0].subject}'")
        more_s = sum(len(message.data) for message in messages) / SLOWEST_BYTES_PER_S
        async with self._window:
            async for timeout_s in attempts:
                try:
                    answer = await self._put_batch(messages, timeout_s + more_s)
                except ApiError as error:
                    if parts and error.code == Code.ATOMIC_DISABLED:
                        raise ConfigError(f"{error}: the stream was made by another version; remove it") from None
                    if error.code in (Code.ATOMIC_DISABLED, Code.BATCH_DUPLICATE):
                        return None
                    attempts.why = error
                except StreamFull:
                    raise
                except Unavailable as error:
                    attempts.why = _hint(messages[0].subject, error)
                else:
                    last = int(answer["seq"])
                    return list(range(last - len(messages) + 1, last + 1))
        raise AssertionError("retry_until ends by raising")

    async def _put_batch(self, messages: list[Outgoing], timeout_s: float) -> dict[str, Any]:
        batch, unseen = secrets.token_hex(12), 0
        for number, message in enumerate(messages[:-1], 1):
            await self._connection.send(message.subject, message.data, headers=_batch_headers(message, batch, number))
            unseen += len(message.data)
            if unseen > FLUSH_BYTES:
                await self._connection.echo(timeout_s)
                unseen = 0
        last = messages[-1]
        headers = {**_batch_headers(last, batch, len(messages)), "Nats-Batch-Commit": "1"}
        return await self._put(last.subject, last.data, headers, timeout_s)

    async def _put(self, subject: str, data: bytes, headers: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        try:
            raw = await self._connection.request(subject, data, timeout_s=timeout_s, headers=headers)
        except Unavailable:
            self._connection.doubt()
            raise
        try:
            answer: dict[str, Any] = msgspec.json.decode(raw.data)
        except msgspec.DecodeError:
            raise ProtocolError(f"'{subject}' belongs to no stream: something else answered a publish") from None
        if "error" in answer:
            _refused(subject, answer)
        self._connection.trust()
        return answer

    async def _resolve(self, subject: str, msg_id: str, expected: int, error: Conflict) -> int:
        """Handle the server's refusal of a message because the newest message of the subject no longer has the stream
        sequence number ``expected``. If an earlier attempt stored this message, return its stream sequence number;
        otherwise raise Conflict.

        The server compares the expected stream sequence number before it looks for repeated message ids.
        """
        message = await first_at_or_after(self._connection, str(error.args[1]), subject, expected + 1)
        if message is not None and message.headers.get(MSG_ID) == msg_id:
            return message.seq
        raise Conflict(str(error.args[0]))


def _named(message: Outgoing) -> Outgoing:
    if message.msg_id:
        return message
    return Outgoing(message.subject, message.data, message.headers, secrets.token_hex(12))


def _batch_headers(message: Outgoing, batch: str, number: int) -> dict[str, str]:
    return {
        **message.headers,
        MSG_ID: message.msg_id or "",
        "Nats-Batch-Id": batch,
        "Nats-Batch-Sequence": str(number),
    }


def check_size(subject: str, data: bytes) -> None:
    """Check that a message is small enough to be published as it is.

    Raises:
        ProtocolError: more than 1 MiB.
    """
    if len(data) > MAX_INLINE_BYTES:
        raise ProtocolError(
            f"{len(data)} bytes on '{subject}' are more than {MAX_INLINE_BYTES}: "
            "send a reference (bulk plane), or publish it in parts"
        )


def _hint(subject: str, error: Unavailable) -> Unavailable | str:
    if isinstance(error, NoResponders):
        return (
            f"no stream takes '{subject}' (JetStream is starting, the streams were not created, or the server switched "
            "JetStream off)"
        )
    if isinstance(error, NoAnswer):
        return f"{error}; NATS gives none where a write failed, say on a full disk: its log and its /healthz tell"
    return error


def _refused(subject: str, answer: Mapping[str, Any]) -> NoReturn:
    error = answer["error"]
    code, text = error.get("err_code", 0), str(error.get("description", ""))
    stream = str(answer.get("stream", ""))
    if code in CONFLICTS:
        raise Conflict(f"publish on '{subject}': {text}; somebody else wrote to it", stream)
    if code in (Code.STORAGE_RESOURCES, Code.INSUFFICIENT_RESOURCES) or "maximum" in text:
        raise StreamFull(f"stream {stream or 'of ' + subject} is full: {text}; retry when it was purged")
    raise_error(error, f"publish on '{subject}'")
