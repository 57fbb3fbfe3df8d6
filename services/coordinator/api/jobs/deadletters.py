"""Routes about dead letters: messages that could not be processed, stored with the reason."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep, JobId
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.jobs.operations import begin
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.shared.protocol.jobs import Operation

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs/{job_id}/dead-letters", tags=["dead letters"])

_SEQ_MAX = (1 << 53) - 1
DeadLetterId = Annotated[int, Path(ge=1, le=_SEQ_MAX, description="As the list shows it")]


class DeadLetterRow(BaseModel):
    """A dead letter: its source stream, number of delivery attempts, reason, and draw (one prompt taken for training)
    if it belongs to one."""

    id: int
    time: float
    stream: str
    sequence: int
    attempts: int
    reason: str
    draw: str | None


class DeadLetter(DeadLetterRow):
    """A dead letter with its headers and content. The content of a ticket (a request to a rollout worker) is decoded;
    for any other message, the content is its first bytes."""

    nbytes: int
    headers: dict[str, str]
    content: Any


class DeadLetterList(BaseModel):
    """One page of dead letters, oldest first; ``after=last_id`` gets the next page."""

    object: Literal["list"] = "list"
    data: list[DeadLetterRow]
    has_more: bool = False
    first_id: int | None = None
    last_id: int | None = None


@router.get("", response_model=DeadLetterList, dependencies=[require("jobs:read")])
async def list_dead_letters(
    job: JobId,
    backend: BackendDep,
    after: Annotated[int, Query(ge=0, le=_SEQ_MAX)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List the dead letters of a job, oldest first."""
    await backend.jobs.get(job)
    found = await backend.dead_letters.page(job, after=after, limit=limit + 1)
    page = [DeadLetterRow(**row) for row in found[:limit]]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return Json(DeadLetterList(data=page, has_more=len(found) > limit, first_id=first, last_id=last))


@router.get("/{letter}", response_model=DeadLetter, dependencies=[require("jobs:read")])
async def get_dead_letter(job: JobId, letter: DeadLetterId, backend: BackendDep) -> Response:
    """Show a dead letter."""
    await backend.jobs.get(job)
    return Json(await backend.dead_letters.show(job, letter))


@router.delete("/{letter}", status_code=204, dependencies=[require("jobs:write")])
async def drop_dead_letter(job: JobId, letter: DeadLetterId, backend: BackendDep) -> Response:
    """Delete a dead letter. The ledger does not change: it recorded the end of the draw when the dead letter was
    stored."""
    await backend.jobs.get(job)
    await backend.dead_letters.drop(job, letter)
    return Response(status_code=204)


@router.post("/{letter}/replay", status_code=202, response_model=Operation)
async def replay_dead_letter(
    job: JobId, letter: DeadLetterId, caller: Annotated[Caller, require("jobs:write")], backend: BackendDep
) -> Response:
    """Retry a dead letter of a running job: its prompt becomes a new draw in the ledger; the dead letter is dropped.

    A dead letter of live interactions or feedback is stored in its stream again, except items that the job has received
    or decided meanwhile (``result.stored`` counts the stored items). If the dead letter still cannot be decoded, the
    operation fails and the dead letter stays.
    """
    await backend.jobs.get(job)
    await backend.dead_letters.check_replayable(job, letter)
    return await begin(backend, job, "replay_dead_letter", caller, {"id": letter})
