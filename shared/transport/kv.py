"""Key-value bucket with compare-and-set and watching, on a JetStream stream with one message per key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from penstock.shared.errors import Conflict, NotFound, ProtocolError
from penstock.shared.transport.connection import Connection
from penstock.shared.transport.follow import Reader
from penstock.shared.transport.jetstream import ApiError, call
from penstock.shared.transport.message import Message
from penstock.shared.transport.publish import Publisher
from penstock.shared.transport.read import last

__all__ = ["Entry", "KeyValue", "Watch"]

OPERATION = "KV-Operation"
TIME_TO_LIVE = "Nats-TTL"
KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*\Z")


@dataclass(frozen=True, slots=True)
class Entry:
    """Key and value at a revision; ``value`` is None if the key was deleted.

    ``time`` is when the server stored this revision (Unix seconds).
    """

    key: str
    value: bytes | None
    revision: int
    time: float


class KeyValue:
    """Key-value bucket. Keys are dot-separated tokens of letters, digits, ``-``, ``_``, ``/`` and ``=``."""

    def __init__(self, connection: Connection, publisher: Publisher, bucket: str) -> None:
        self.bucket = bucket
        self._connection = connection
        self._publisher = publisher
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def get(self, key: str, *, deadline_s: float = 5.0) -> Entry | None:
        """Return the newest entry of a key from the leader, or None if the key has no value."""
        entry = await self._last(key, deadline_s)
        return entry if entry is not None and entry.value is not None else None

    async def create(self, key: str, value: bytes, *, keep_s: float | None = None, deadline_s: float = 5.0) -> int:
        """Store a value if the key was never set or was deleted; return the revision of the value.

        Args:
            keep_s: time after which the entry expires; only in buckets whose entries expire.

        Raises:
            Conflict: the key has a value.
        """
        headers = _kept(keep_s)
        try:
            return await self._put(key, value, 0, deadline_s, headers)
        except Conflict:
            entry = await self._last(key, deadline_s)
            if entry is None or entry.value is not None:
                raise
            return await self._put(key, value, entry.revision, deadline_s, headers)

    async def update(
        self, key: str, value: bytes, revision: int, *, keep_s: float | None = None, deadline_s: float = 5.0
    ) -> int:
        """Replace a value whose revision is ``revision``; return the new revision. ``keep_s``: see ``create``.

        Raises:
            Conflict: the key is at another revision.
        """
        return await self._put(key, value, revision, deadline_s, _kept(keep_s))

    async def overwrite(self, key: str, value: bytes, revision: int, *, keep_s: float | None = None) -> int:
        """Update a value as ``update`` does, and overwrite the old bytes in the server's files if the bucket allows it.

        Raises:
            Conflict: the key is at another revision.
            Unavailable: the update failed; the key may then have no value.
        """
        info = await call(self._connection, f"STREAM.INFO.{self._stream}", deadline_s=5.0, what=f"of {self.bucket}")
        if info["config"].get("deny_delete"):
            return await self.update(key, value, revision, keep_s=keep_s)
        what = f"delete revision {revision} of '{key}'"
        try:
            await call(
                self._connection, f"STREAM.MSG.DELETE.{self._stream}", {"seq": revision}, deadline_s=5.0, what=what
            )  # fmt: skip
        except (NotFound, ApiError) as error:
            entry = await self._last(key, 5.0)
            if entry is not None and entry.revision == revision:
                raise
            raise Conflict(str(error)) from None
        return await self.create(key, value, keep_s=keep_s)

    async def put(self, key: str, value: bytes, *, deadline_s: float = 5.0) -> int:
        """Store a value unconditionally; return its revision."""
        return await self._put(key, value, None, deadline_s)

    async def send(self, key: str, value: bytes) -> None:
        """Send a value without waiting until it is stored.

        The server receives it before later messages of this connection; at most once, as storage is not confirmed.

        Raises:
            Unavailable: not connected.
        """
        await self._connection.send(self._prefix + self._checked(key), value)

    async def delete(self, key: str, *, revision: int | None = None, deadline_s: float = 5.0) -> None:
        """Replace the value by a deletion marker (which watchers see).

        Raises:
            Conflict: ``revision`` was given and the key is at another one.
        """
        await self._put(key, b"", revision, deadline_s, {OPERATION: "DEL"})

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Return the entries whose key is ``prefix`` or begins with ``prefix.``, oldest first; all if ``prefix`` is
        empty."""
        return [entry for entry in await self._read(prefix, headers_only=False) if entry.value is not None]

    async def keys(self, prefix: str = "") -> list[str]:
        """Return keys that have a value and begin with the tokens of ``prefix``."""
        return sorted(entry.key for entry in await self._read(prefix, headers_only=True) if entry.value is not None)

    async def changes(self, *, after: int) -> AsyncGenerator[Entry]:
        """Yield the newest change of each key, a value or a deletion, if its revision is above ``after``. End at the
        newest change that exists now."""
        reader = self.reader(self.subjects("")[0], follow=False, start_seq=after + 1 if after else None)
        async with contextlib.aclosing(reader):
            async for message in reader:
                yield self.entry(message)

    def watch(self, prefix: str = "", *, include_current: bool = True) -> Watch:
        """Follow all changes below ``prefix`` (deletions have value None), by default starting with the current values.

        Survives reconnects; of several changes of a key during an interruption only the newest is seen.
        """
        return Watch(self, prefix, include_current)

    async def _read(self, prefix: str, *, headers_only: bool) -> list[Entry]:
        found = []
        for subject in self.subjects(prefix):
            reader = self.reader(subject, headers_only=headers_only, follow=False)
            found += [self.entry(message) async for message in reader]
        return sorted(found, key=lambda entry: entry.revision)

    def subjects(self, prefix: str) -> list[str]:
        """Return filters for the subjects of the key ``prefix`` and of all keys that begin with ``prefix.``; if
        ``prefix`` is empty, of all keys."""
        if not prefix:
            return [self._prefix + ">"]
        return [self._prefix + self._checked(prefix), f"{self._prefix}{prefix}.>"]

    def reader(self, subject: str, *, headers_only: bool = False, follow: bool, start_seq: int | None = None) -> Reader:
        """Return a reader of this bucket's stream, from stream sequence number ``start_seq`` on. None: first the newest
        entry of each key, then all later changes."""
        return Reader(
            self._connection,
            self._stream,
            subject,
            start_seq=start_seq or 1,
            headers_only=headers_only,
            follow=follow,
            last_per_subject=start_seq is None,
        )

    async def end(self) -> int:
        """Return the stream sequence number of the bucket's newest change."""
        info = await call(
            self._connection, f"STREAM.INFO.{self._stream}", deadline_s=5.0, what=f"state of bucket '{self.bucket}'"
        )
        return int(info["state"]["last_seq"])

    def entry(self, message: Message) -> Entry:
        """Convert a stored message to an entry."""
        gone = message.headers.get(OPERATION) in ("DEL", "PURGE")
        key = message.subject.removeprefix(self._prefix)
        return Entry(key, None if gone else message.data, message.seq, message.time)

    async def _last(self, key: str, deadline_s: float) -> Entry | None:
        subject = self._prefix + self._checked(key)
        message = await last(self._connection, self._stream, subject, deadline_s=deadline_s)
        return self.entry(message) if message is not None else None

    async def _put(
        self, key: str, value: bytes, revision: int | None, deadline_s: float, headers: dict[str, str] | None = None
    ) -> int:
        return await self._publisher.publish(
            self._prefix + self._checked(key),
            value,
            headers=headers,
            msg_id=None,
            expect_last_subject_seq=revision,
            deadline_s=deadline_s,
        )

    def _checked(self, key: str) -> str:
        if not KEY.match(key):
            raise ProtocolError(f"'{key}' is not a key: use letters, digits, '-', '_', '/', '=' and single dots")
        return key


def _kept(keep_s: float | None) -> dict[str, str] | None:
    return None if keep_s is None else {TIME_TO_LIVE: f"{max(1, round(keep_s))}s"}


class Watch:
    """Async iterator over the changes of a bucket. Call ``aclose`` after use."""

    def __init__(self, bucket: KeyValue, prefix: str, include_current: bool) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._include_current = include_current
        self._reader: Reader | None = None

    def __aiter__(self) -> AsyncIterator[Entry]:
        return self

    async def __anext__(self) -> Entry:
        if self._reader is None:
            await self.start()
        assert self._reader is not None
        while True:
            entry = self._bucket.entry(await anext(self._reader))
            if not self._prefix or entry.key == self._prefix or entry.key.startswith(self._prefix + "."):
                return entry

    async def start(self) -> None:
        """Start to watch now, so that the iteration includes every change from now on. Without this call, the first
        ``anext`` starts to watch."""
        if self._reader is None:
            start = None if self._include_current else await self._bucket.end() + 1
            self._reader = self._bucket.reader(self._bucket.subjects("")[0], follow=True, start_seq=start)

    async def aclose(self) -> None:
        """Stop watching."""
        if self._reader is not None:
            await self._reader.aclose()
