"""Audit log as the HTTP API uses it. Implemented in ``coordinator.access``."""

from __future__ import annotations

from typing import Protocol

from penstock.shared.protocol.audit_log import AuditRecord

__all__ = ["AuditLog"]


class AuditLog(Protocol):
    """Records are added and read, never changed. Every method may raise Unavailable."""

    async def append(self, record: AuditRecord) -> None:
        """Store a record; on disk when this returns."""
        ...

    async def page(
        self, *, key: str, job: str, since: float | None, after: int, limit: int
    ) -> list[tuple[int, AuditRecord]]:
        """At most ``limit`` records with a sequence above ``after``, oldest first, each with its sequence.

        ``key`` and ``job`` ('': any) filter by equality; ``since`` (Unix seconds): only those stored from then on.
        """
        ...
