"""JSON replies, and problem documents (RFC 9457), which also contain an error object in OpenAI's format."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from pydantic import BaseModel, Field
from starlette.responses import Response

from penstock.services.coordinator.problems import Flaw, HttpProblem

__all__ = ["Json", "Problem", "problem_body", "problem_response"]


class ErrorObject(BaseModel):
    """A problem in the format of OpenAI's errors."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Problem(BaseModel):
    """Body of every reply with a status of 400 or above."""

    type: str = Field(description="urn:penstock:problem:CODE")
    title: str
    status: int
    detail: str
    instance: str
    errors: list[Flaw] = []
    max_bytes: int | None = Field(None, description="With 413: the limit in bytes")
    error: ErrorObject

    def document(self) -> dict[str, Any]:
        """Return the document as a JSON object, without ``max_bytes`` if it is None."""
        return self.model_dump(mode="json", exclude={"max_bytes"} if self.max_bytes is None else None)


class Json(Response):
    """A JSON reply; non-finite floats become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return ``content`` as JSON bytes."""
        if isinstance(content, BaseModel):
            content = content.model_dump(mode="json")
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def problem_body(problem: HttpProblem, instance: str) -> Problem:
    """Return the problem document of ``problem``; ``instance`` is the path of the request."""
    return Problem(
        type=f"urn:penstock:problem:{problem.code}",
        title=HTTPStatus(problem.status).phrase,
        status=problem.status,
        detail=problem.detail,
        instance=instance,
        errors=problem.errors,
        max_bytes=problem.max_bytes,
        error=ErrorObject(
            message=problem.detail,
            type=_openai_type(problem.status),
            param=problem.errors[0].pointer if problem.errors else None,
            code=problem.code,
        ),
    )


def problem_response(problem: HttpProblem, instance: str) -> Response:
    """Return the reply for ``problem``; ``instance`` is the path of the request."""
    status, body = problem.status, problem_body(problem, instance)
    headers = dict(problem.headers)
    if status == 409:  # OpenAI's SDKs retry a 409 by default
        headers.setdefault("x-should-retry", "false")
    return Response(orjson.dumps(body.document()), status, headers, "application/problem+json")


def _openai_type(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")
