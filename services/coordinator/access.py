"""Stores API keys (bucket `keys`) and the audit log (stream AUDIT, which the server makes append-only)."""

from __future__ import annotations

import contextlib
import secrets
from datetime import datetime

from penstock.shared.errors import Conflict, NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.audit_log import AuditRecord, decode_record, encode_record
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.keys import Scope, StoredKey, new_key
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.message import Message

__all__ = ["AuditLog", "KeyStore"]

SECRET = "episode-keys"
BLOCK = 10_000
"""Size of the largest block (in stream sequence numbers) that ``AuditLog.page`` reads at a time to return the newest
records first."""
APPEND_S = 2.0
"""Deadline for storing one audit record (seconds), about as long as a fail-over of the bus. The response to a request
waits until the request's record is stored."""


class AuditLog:
    """Append-only log of requests. Every method may raise Unavailable."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def append(self, record: AuditRecord) -> None:
        """Append a record; return once the record is on disk."""
        subject = subjects.audit(record.key, record.job)
        await self._bus.publish(subject, encode_record(record), msg_id=record.request, deadline_s=APPEND_S)

    async def page(
        self, *, key: str, job: str, since: float | None, after: int | None, limit: int, newest_first: bool
    ) -> list[tuple[int, AuditRecord]]:
        """Return at most ``limit`` records, each with its stream sequence number, oldest or newest first.

        Args:
            key: only requests made with the key of this id ('': with any key).
            job: only requests about the job with this id ('': also requests about other jobs or none).
            since: only records stored at this time or later (Unix seconds).
            after: only records that follow this stream sequence number in the order of the page (None: from its start).
        """
        subject = subjects.audits(key, job)
        first = 1 if since is None else await self._first_since(since)
        if newest_first:
            messages = await self._newest(subject, first, after, limit)
        else:
            messages = await self._oldest(subject, max(first, (after or 0) + 1), limit)
        return [(message.seq, decode_record(message.data)) for message in messages]

    async def _oldest(self, subject: str, first: int, limit: int) -> list[Message]:
        """Return at most ``limit`` messages, oldest first, from the stream sequence number ``first`` on."""
        found: list[Message] = []
        async with contextlib.aclosing(self._bus.scan(subjects.AUDIT, subject, start_seq=first)) as messages:
            async for message in messages:
                found.append(message)
                if len(found) == limit:
                    break
        return found

    async def _newest(self, subject: str, first: int, before: int | None, limit: int) -> list[Message]:
        """Return at most ``limit`` messages with stream sequence numbers from ``first`` to below ``before``, newest
        first.

        The server reads streams forwards only, so this reads blocks of growing size, the newest block first.
        """
        state = await self._bus.stream_state(subjects.AUDIT)
        first, end = max(first, state.first_seq), state.last_seq
        if before is not None:
            end = min(end, before - 1)
        found: list[Message] = []
        size = limit
        while first <= end and len(found) < limit:
            start = max(first, end - size + 1)
            found += reversed(await self._bus.read(subjects.AUDIT, subject, start_seq=start, end_seq=end))
            end, size = start - 1, min(4 * size, BLOCK)
        return found[:limit]

    async def _first_since(self, since: float) -> int:
        """Return the stream sequence number of the first record stored at the time ``since`` or later.

        Binary search works because times rise with the stream sequence number, and the stream deletes only its oldest
        records.
        """
        state = await self._bus.stream_state(subjects.AUDIT)
        low, high = max(1, state.first_seq), state.last_seq + 1
        while low < high:
            middle = (low + high) // 2
            try:
                too_old = (await self._bus.get(subjects.AUDIT, middle)).time < since
            except NotFound:  # it was purged meanwhile
                too_old = True
            low, high = (middle + 1, high) if too_old else (low, middle)
        return low


class KeyStore:
    """API keys, shared by all replicas. Every method may raise Unavailable."""

    def __init__(self, bus: Bus) -> None:
        self._kv, self._private = bus.kv(subjects.KEYS), bus.kv(subjects.PRIVACY)
        self._secret = b""

    async def create(
        self, name: str, scopes: list[Scope], *, expires_at: datetime | None, rate_limit: str | None,
        models: list[str] | None = None, max_weight: float = 1.0, code_modules: list[str] | None = None,
    ) -> tuple[StoredKey, str]:  # fmt: skip
        """Store a new key durably; return the record and the key's text, which cannot be shown again."""
        id, text, digest = new_key()
        key = StoredKey(
            id=id, name=name, scopes=scopes, created_at=bus_datetime(), expires_at=expires_at,
            rate_limit=rate_limit, models=models, max_weight=max_weight, code_modules=code_modules, digest=digest,
        )  # fmt: skip
        await self._kv.create(id, key.model_dump_json().encode())
        return key, text

    async def find(self, id: str) -> StoredKey | None:
        """Return the key with this id, or None."""
        entry = await self._kv.get(id)
        return StoredKey.model_validate_json(entry.value) if entry is not None and entry.value is not None else None

    async def list_all(self) -> list[StoredKey]:
        """Return all keys, oldest first."""
        entries = await self._kv.entries()
        return [StoredKey.model_validate_json(entry.value) for entry in entries if entry.value is not None]

    async def delete(self, id: str) -> None:
        """Revoke a key. Raises NotFound."""
        if await self.find(id) is None:
            raise NotFound(f"no key '{id}'")
        await self._kv.delete(id)

    async def secret(self) -> bytes:
        """Return the 32-byte secret that signs episode keys and feedback tokens. Each deployment creates its secret
        once."""
        if not self._secret:
            if await self._private.get(SECRET) is None:
                with contextlib.suppress(Conflict):  # another replica was faster
                    await self._private.create(SECRET, secrets.token_bytes(32))
            entry = await self._private.get(SECRET)
            if entry is None or not entry.value:
                raise Unavailable("the secret of episodes' keys is gone from the bucket `privacy`")
            self._secret = entry.value
        return self._secret
