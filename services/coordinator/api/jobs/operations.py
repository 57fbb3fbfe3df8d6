"""Start of long-running operations on a job."""

from __future__ import annotations

from typing import Any

import uuid6
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.auth import Caller
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.jobs import Operation, OperationKind

__all__ = ["begin"]


async def begin(
    backend: Backend, job: str, kind: OperationKind, caller: Caller, args: dict[str, Any] | None = None
) -> Response:
    """Start an operation; return a reply (202) that contains the operation. Raises Conflict: the job is terminal."""
    operation = Operation(
        id=f"op_{uuid6.uuid7().hex}", kind=kind, by=caller.id, created_at=bus_datetime(), args=args or {}
    )
    await backend.steering.begin_operation(job, operation)
    return Json(operation, 202, {"Location": f"/v1/jobs/{job}/operations/{operation.id}"})
