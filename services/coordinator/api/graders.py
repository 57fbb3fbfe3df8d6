"""Routes that try graders in OpenAI's format before a job uses them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.config.rewards.graders import (
    AnyGrader,
    InlineGrader,
    MultiGrader,
    ScoreModelGrader,
    parts_of,
    total_of,
)
from penstock.shared.protocol.grading import GRADER_ERRORS, GradeReply, error_text, split_error

__all__ = ["router"]

router = APIRouter(tags=["graders"], dependencies=[require("jobs:write")])


class GraderToValidate(BaseModel):
    """A grader to check."""

    model_config = ConfigDict(extra="forbid")

    grader: InlineGrader


class GraderToRun(GraderToValidate):
    """A grader and the answer that it grades."""

    model_sample: str = Field(max_length=1 << 20, description="Answer of a model: `sample.output_text`")
    item: dict[str, Any] = Field({}, description="The data row")


class Validated(BaseModel):
    """Reply about a valid grader; a reward worker has loaded it successfully."""

    grader: dict[str, Any]


class RunErrors(BaseModel):
    """One flag per kind of failure; all are false after a success."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    other_error_details: str | None = None
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False


class RunMetadata(BaseModel):
    """Metadata of the run; ``execution_time`` in seconds."""

    name: str
    type: str
    errors: RunErrors
    execution_time: float
    scores: dict[str, float]
    token_usage: int | None = None
    sampled_model_name: str | None = None


class GraderRun(BaseModel):
    """Result of grading one answer: ``reward`` (0 after an error), and ``sub_rewards``, the reward of each part of a
    multi grader."""

    reward: float
    sub_rewards: dict[str, float]
    metadata: RunMetadata
    model_grader_token_usage_per_model: dict[str, int] = {}


_VALIDATE: dict[str, Any] = {"response_model": Validated, "openapi_extra": body_schema(GraderToValidate)}
_RUN: dict[str, Any] = {"response_model": GraderRun, "openapi_extra": body_schema(GraderToRun)}


@router.post("/v1/graders/validate", **_VALIDATE)
@router.post("/v1/fine_tuning/alpha/graders/validate", operation_id="validate_grader_as_openai", **_VALIDATE)
async def validate_grader(request: Request, backend: BackendDep) -> Response:
    """Check a grader: its template slots, its formula, and that a reward worker can load it. For that, its Python code
    must be valid, and the worker must have the sandbox and the API keys that the grader needs."""
    wanted = await read_model(request, GraderToValidate)
    reply = await backend.graders.grade(wanted.grader, None, {})
    if reply.error:
        flaw = Flaw(pointer="/grader", detail=reply.error)
        raise HttpProblem(422, "invalid_grader", f"the grader cannot be opened: {reply.error}", errors=[flaw])
    return Json({"grader": wanted.grader.model_dump(mode="json", exclude_unset=True)})


@router.post("/v1/graders/run", **_RUN)
@router.post("/v1/fine_tuning/alpha/graders/run", operation_id="run_grader_as_openai", **_RUN)
async def run_grader(request: Request, backend: BackendDep) -> Response:
    """Grade one answer. A reward worker starts a process for it, and kills the process if grading takes more than 30 s.
    The reply flags errors of the grader."""
    wanted = await read_model(request, GraderToRun)
    return Json(_run(wanted.grader, await backend.graders.grade(wanted.grader, wanted.model_sample, wanted.item)))


def _run(grader: AnyGrader, reply: GradeReply) -> GraderRun:
    parts = parts_of(grader)
    scores = dict(zip(parts, reply.scores, strict=True)) if reply.scores else {}
    reward, error = 0.0, reply.error
    if not error:
        try:
            reward = total_of(grader, scores)
        except ValueError as problem:
            error = error_text("formula_parse_error", str(problem))
    models = {part.model for part in parts.values() if isinstance(part, ScoreModelGrader)}
    metadata = RunMetadata(
        name=grader.name, type=grader.type, errors=_errors(error), execution_time=reply.seconds, scores=scores,
        sampled_model_name=min(models) if len(models) == 1 else None,
    )  # fmt: skip
    return GraderRun(reward=reward, sub_rewards=scores if isinstance(grader, MultiGrader) else {}, metadata=metadata)


def _errors(error: str) -> RunErrors:
    if not error:
        return RunErrors()
    flag, detail = split_error(error)
    assert flag in GRADER_ERRORS
    raised: dict[str, Any] = {flag: True}
    if f"{flag}_details" in RunErrors.model_fields:
        raised[f"{flag}_details"] = detail
    if flag == "python_grader_server_error":
        raised["python_grader_server_error_type"] = detail
    return RunErrors(**raised)
