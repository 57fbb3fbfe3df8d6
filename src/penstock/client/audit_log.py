"""Audit log of a deployment, for both clients: ``client.audit_log``. Needs the scope ``admin``."""

from __future__ import annotations

from typing import Literal

from penstock.client.flows import rows
from penstock.client.results import AuditEntry
from penstock.client.sending import AsyncSend, Send, Steps, awaits_all, runs

__all__ = ["AsyncAuditLog", "AuditLog"]


def _list(
    *,
    since: float | None = None,
    key: str | None = None,
    job: str | None = None,
    limit: int = 100,
    order: Literal["asc", "desc"] = "desc",
) -> Steps[list[AuditEntry]]:
    """List up to ``limit`` requests that changed something, newest first unless ``order`` is ``asc``.

    Args:
        since: Unix seconds; only requests from then on.
        key: id of a key; only its requests.
        job: id of a job; only requests that concern or created it.
    """
    return (yield from rows(AuditEntry, "/v1/audit-log", "id", limit, since=since, key=key, job=job, order=order))


class AuditLog:
    """Audit log: ``list`` the requests that changed something."""

    def __init__(self, send: Send) -> None:
        self._send = send

    list = runs(_list)


class AsyncAuditLog:
    """Audit log: ``list`` the requests that changed something."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    list = awaits_all(_list)
