"""Route that shows one completion with every token, for a trajectory viewer."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.own_models import check_job
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.shared.errors import NotFound

__all__ = ["SAMPLE_ID", "router"]

SAMPLE_ID = re.compile(r"(job_[0-9a-f]{32})-(.{1,64})", re.ASCII)

router = APIRouter(prefix="/v1/samples", tags=["observe"])


class Sample(BaseModel):
    """A stored completion; a reply also contains the fields of the completion's row in the list of samples."""

    model_config = ConfigDict(extra="allow")

    id: str
    job: str
    env: str = Field(description="Source of the prompt; empty for a live agent")
    prompt_token_ids: list[int]
    token_ids: list[int]
    token_texts: list[str] | None = Field(
        None, description="Text of each token; null if the coordinator does not have the job's tokenizer"
    )
    logprobs: list[float] = Field(description="Log-probs of the sampler (natural logarithm)")
    mask: list[int] = Field(description="1: the policy chose the token; 0: an observation")
    versions: list[int] = Field(description="Version of the policy that sampled the token")
    parts: dict[str, Any] = Field(description="Reward by component")
    siblings: list[str] = Field(description="Ids of the other completions of the group")


@router.get("/{sample_id}", response_model=Sample)
async def get_sample(
    sample_id: Annotated[str, Path(max_length=128, description="JOB-STEP-DRAW-INDEX, as in the list of samples")],
    caller: Annotated[Caller, require("jobs:read", reach="checked")],
    backend: BackendDep,
) -> Response:
    """Show a completion token by token: ids, sampler log-probs, mask, policy versions, reward by component."""
    found = SAMPLE_ID.fullmatch(sample_id)
    if found is None:
        raise NotFound(f"'{sample_id[:80]}' is no sample: JOB-STEP-DRAW-INDEX, as the list of samples shows it")
    await check_job(backend, caller, found[1], f"no job '{found[1]}'")
    return Json(await backend.samples.one(found[1], found[2]))
