"""Route that lists the audit log, which records the requests that changed something."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep, SomeJob
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.jobs.job_index import Order

__all__ = ["router"]

router = APIRouter(tags=["keys"])

_SEQ_MAX = (1 << 53) - 1
_LATEST_S = 1e11


class AuditEntry(BaseModel):
    """One authorized request that may have changed something."""

    id: int = Field(description="Sequence number in the log")
    request: str = Field(description="`x-request-id` of its reply")
    time: float = Field(description="Start of the reply (Unix seconds)")
    key: str = Field(description="Id of the key of the request; `local`: without configured keys")
    key_name: str
    address: str = Field(description="Address of the client, as far as proxies are trusted")
    method: str
    route: str = Field(description="Template of the path")
    path: dict[str, str] = Field(description="Values of the path's parameters; a user as the pseudonym")
    query: dict[str, str]
    status: int
    job: str = Field(description="Job that the request concerns or created; empty for none")
    location: str = Field(description="Path of the created object")
    replayed: bool = Field(description="Answered as an earlier request with its Idempotency-Key; nothing was done")
    idempotency_key: str
    body_sha256: str = Field(description="SHA-256 of the body as far as it was read; empty without a body")
    trace: str


class AuditPage(BaseModel):
    """One page of the audit log; ``after=last_id`` gets the next page."""

    object: Literal["list"] = "list"
    data: list[AuditEntry]
    has_more: bool = False
    first_id: int | None = None
    last_id: int | None = None


@router.get("/v1/audit-log", response_model=AuditPage, dependencies=[require("admin")])
async def list_audit_log(
    *,
    job: SomeJob,
    backend: BackendDep,
    key: Annotated[str, Query(max_length=64, description="Only requests with this key (id)")] = "",
    since: Annotated[
        float | None, Query(ge=0, le=_LATEST_S, description="Unix seconds: only entries from then on")
    ] = None,
    after: Annotated[int | None, Query(ge=0, le=_SEQ_MAX, description="last_id of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "desc",
) -> Response:
    """List the requests that changed something, newest first unless ``order=asc``: sender, time, address, and result.

    No request can change or remove an entry; the oldest entries are dropped when the log reaches its size limit.
    """
    found = await backend.audit_log.page(
        key=key, job=job, since=since, after=after or None, limit=limit + 1, newest_first=order == "desc"
    )
    page = [AuditEntry(id=seq, **msgspec.structs.asdict(record)) for seq, record in found[:limit]]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return Json(AuditPage(data=page, has_more=len(found) > limit, first_id=first, last_id=last))
