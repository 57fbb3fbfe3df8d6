"""Reading of stored messages by stream sequence number: direct get, which needs no consumer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.shared.errors import NotFound, Unavailable
from penstock.shared.protocol.parts import count_of
from penstock.shared.transport.connection import Connection, NoResponders
from penstock.shared.transport.inbox import Raw
from penstock.shared.transport.jetstream import call, retry_until
from penstock.shared.transport.message import Message, own_headers, unix_time
from penstock.shared.transport.parts import whole

__all__ = ["first_at_or_after", "get", "get_many", "get_whole", "last"]

WINDOW = 64
"""Concurrent direct gets of one call; at 1 MiB each this bounds the bytes in flight."""


async def get(
    connection: Connection, stream: str, seq: int, *, deadline_s: float = 5.0, direct: bool = True
) -> Message:
    """Return the message with stream sequence number ``seq``, from any replica that has it; if not ``direct``, only
    from the leader.

    Raises:
        NotFound: the leader of the stream does not have it (a lagging replica is not trusted).
        Unavailable: no answer until the deadline.
    """
    found = await _direct(connection, stream, {"seq": seq}, deadline_s) if direct else None
    return found or await _from_leader(connection, stream, {"seq": seq}, deadline_s)


async def get_many(
    connection: Connection, stream: str, seqs: Iterable[int], *, deadline_s: float = 10.0, direct: bool = True
) -> dict[int, Message]:
    """Fetch the messages with these stream sequence numbers concurrently. The result lacks messages that do not
    exist."""
    window = asyncio.Semaphore(WINDOW)

    async def one(seq: int) -> Message | None:
        async with window:
            try:
                return await get(connection, stream, seq, deadline_s=deadline_s, direct=direct)
            except NotFound:
                return None

    wanted = list(dict.fromkeys(seqs))
    found = await asyncio.gather(*(one(seq) for seq in wanted))
    return {message.seq: message for message in found if message is not None}


async def get_whole(
    connection: Connection, stream: str, seqs: Iterable[int], *, deadline_s: float = 10.0, direct: bool = True
) -> dict[int, Message]:
    """Fetch the payloads whose first parts have these stream sequence numbers, and join their parts. The result lacks
    incomplete payloads."""
    found = await get_many(connection, stream, seqs, deadline_s=deadline_s, direct=direct)
    begun = list(found.values())
    more = [message.seq + place for message in begun for place in range(1, count_of(message.headers))]
    found |= await get_many(connection, stream, more, deadline_s=deadline_s, direct=direct)
    return {first.seq: message for first in begun if (message := whole(first, found)) is not None}


async def last(connection: Connection, stream: str, subject: str, *, deadline_s: float = 5.0) -> Message | None:
    """Return the newest message on ``subject`` from the leader, or None."""
    try:
        return await _from_leader(connection, stream, {"last_by_subj": subject}, deadline_s)
    except NotFound:
        return None


async def first_at_or_after(
    connection: Connection, stream: str, subject: str, seq: int, *, deadline_s: float = 5.0
) -> Message | None:
    """Ask the stream's leader for the oldest message on ``subject`` with a stream sequence number of at least ``seq``.
    Return None if there is none."""
    try:
        return await _from_leader(connection, stream, {"seq": seq, "next_by_subj": subject}, deadline_s)
    except NotFound:
        return None


async def _direct(connection: Connection, stream: str, body: dict[str, Any], deadline_s: float) -> Message | None:
    data = msgspec.json.encode(body)
    attempts = retry_until(connection, deadline_s, f"read {body} from {stream}")
    async for timeout_s in attempts:
        try:
            raw = await connection.request(f"$JS.API.DIRECT.GET.{stream}", data, timeout_s=timeout_s)
        except NoResponders:
            return None  # no such stream, or no direct access: ask the leader
        except Unavailable as error:
            attempts.why = error
            continue
        return _from_direct(raw)
    raise AssertionError("retry_until ends by raising")


def _from_direct(raw: Raw) -> Message | None:
    headers = raw.headers or {}
    if "Status" in headers or "Nats-Sequence" not in headers:
        return None
    return Message(
        headers["Nats-Subject"],
        raw.data,
        own_headers(headers),
        int(headers["Nats-Sequence"]),
        unix_time(headers["Nats-Time-Stamp"]),
    )


async def _from_leader(connection: Connection, stream: str, body: dict[str, Any], deadline_s: float) -> Message:
    what = f"message {body} of {stream}"
    answer = await call(connection, f"STREAM.MSG.GET.{stream}", body, deadline_s=deadline_s, what=what)
    stored = answer["message"]
    return Message(
        stored["subject"],
        base64.b64decode(stored.get("data", "")),
        own_headers(_parse_headers(base64.b64decode(stored.get("hdrs", "")))),
        stored["seq"],
        unix_time(stored["time"]),
    )


def _parse_headers(block: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.decode("utf-8", "replace").split("\r\n")[1:] if line)
    return {key.strip(): value.strip() for key, _, value in pairs}
