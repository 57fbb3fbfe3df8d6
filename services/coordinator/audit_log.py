"""The audit log of requests: records in AUDIT, which the server lets nobody change."""

from __future__ import annotations

import contextlib

from penstock.shared.errors import NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.audit_log import AuditRecord, decode_record, encode_record
from penstock.shared.transport.bus import Bus

__all__ = ["AuditLog"]

APPEND_S = 2.0
"""Longest wait for a record, because its request is done and its reply waits; about one fail-over of the bus."""


class AuditLog:
    """Implements ``api.audit_desk.AuditLog``."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def append(self, record: AuditRecord) -> None:
        """See ``AuditLog.append``."""
        subject = subjects.audit(record.key, record.job)
        await self._bus.publish(subject, encode_record(record), msg_id=record.request, deadline_s=APPEND_S)

    async def page(
        self, *, key: str, job: str, since: float | None, after: int, limit: int
    ) -> list[tuple[int, AuditRecord]]:
        """See ``AuditLog.page``."""
        start = after + 1 if since is None else max(after + 1, await self._first_since(since))
        found: list[tuple[int, AuditRecord]] = []
        stored = self._bus.scan(subjects.AUDIT, subjects.audits(key, job), start_seq=start)
        async with contextlib.aclosing(stored) as messages:
            async for message in messages:
                found.append((message.seq, decode_record(message.data)))
                if len(found) == limit:
                    break
        return found

    async def _first_since(self, since: float) -> int:
        """Return the sequence of the first record stored at that time or later.

        Binary search works because the stream loses records only at its old end, without gaps, and times rise.
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
