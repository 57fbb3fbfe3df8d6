"""Request bodies: parsing of JSON and YAML, and validation with a JSON pointer to every flaw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from penstock.services.coordinator.api.http.documents import from_json, from_yaml, step, too_many_flaws
from penstock.services.coordinator.api.http.occupancy import Occupancy
from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.config.explain import explain
from penstock.shared.config.jobs.kinds import AnyJob, job_model

__all__ = ["BODIES", "YAML_TYPES", "body_schema", "job_pointer", "read_job", "read_model", "read_object", "read_parsed"]

T = TypeVar("T")

MAX_SHOWN = 20
"""Maximum number of flaws that a problem document lists."""
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


async def read_job(request: Request) -> tuple[AnyJob, dict[str, Any]]:
    """Return the validated job and the document as it was sent.

    Raises:
        HttpProblem: 400 not parseable, 415 unsupported media type, 422 not a valid job.
    """
    return await read_parsed(request, partial(_job_of, _media_type(request)))


def _job_of(kind: str, body: bytes) -> tuple[AnyJob, dict[str, Any]]:
    raw = _object_of(kind, body, yaml_too=True)
    model = job_model(raw)
    try:
        return model.model_validate(raw), raw
    except ValidationError as error:
        flaws = [Flaw(pointer=job_pointer(raw, key), detail=detail) for key, detail in explain(model, error)]
        first = f"{flaws[0].pointer or '/'}: {flaws[0].detail}"
        more = f" (and {len(flaws) - 1} more)" if len(flaws) > 1 else ""
        raise HttpProblem(422, "invalid_job", f"the job is not valid: {first}{more}", errors=flaws) from None


async def read_object(request: Request, *, patch_too: bool = False) -> dict[str, Any]:
    """Return the JSON body as an object, {} if the body is empty. With ``patch_too``, also accept the media type of
    JSON merge patches."""
    return await read_parsed(request, partial(_object_of, _media_type(request), patch_too=patch_too))


async def read_parsed(request: Request, parse: Callable[[bytes], T]) -> T:
    """Return ``parse(body)``; long bodies are parsed in a thread.

    Raises:
        HttpProblem: 429 no thread was free within WAIT_S.
    """
    body = await request.body()
    state = request.scope.get("state", {})
    try:
        occupancy: Occupancy = request.app.state.backend.occupancy
        return await occupancy.parse(state.get("owner", ""), body, partial(parse, body))
    finally:
        if (large := state.get("large_body")) is not None:
            await large.leave()


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _object_of(kind: str, body: bytes, *, yaml_too: bool = False, patch_too: bool = False) -> dict[str, Any]:
    if not body and not yaml_too:
        return {}
    if yaml_too and kind in YAML_TYPES:
        data = from_yaml(body)
    elif kind == "application/json" or (patch_too and kind == "application/merge-patch+json"):
        data = from_json(body)
    else:
        accepted = "application/json or application/yaml" if yaml_too else "application/json"
        raise HttpProblem(415, "unsupported_media_type", f"Content-Type '{kind}' is not known here; send {accepted}")
    if not isinstance(data, dict):
        detail = f"the body must be an object, found {type(data).__name__}"
        raise HttpProblem(422, "invalid_body", detail, errors=[Flaw(pointer="", detail=detail)])
    return data


M = TypeVar("M", bound=BaseModel)

BODIES: dict[str, type[BaseModel]] = {}
"""Models of request bodies that routes parse themselves, for the OpenAPI document."""


async def read_model(request: Request, model: type[M]) -> M:
    """Return the JSON body as ``model``, without coercion: a number in quotes is not a number.

    Raises:
        HttpProblem: 400 not parseable, 415 unsupported media type, 422 not valid, with a pointer to each flaw.
    """
    return await read_parsed(request, partial(_model_of, _media_type(request), model))


def _model_of(kind: str, model: type[M], body: bytes) -> M:
    data = _object_of(kind, body)
    try:
        return model.model_validate_json(orjson.dumps(_with_integers(data)), strict=True)
    except ValidationError as error:
        if (problem := too_many_flaws(error)) is not None:
            raise problem from None
        flaws = [Flaw(pointer=job_pointer(data, key), detail=detail) for key, detail in explain(model, error)]
        first = f"{flaws[0].pointer or '/'}: {flaws[0].detail}"
        raise HttpProblem(422, "invalid_body", f"the body is not valid: {first}", errors=flaws[:MAX_SHOWN]) from None


def _with_integers(data: Any) -> Any:
    """Convert floats without a fraction to integers, as JSON Schema defines integers."""
    if isinstance(data, dict):
        return {key: _with_integers(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_with_integers(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() and abs(data) < 1 << 53 else data


def body_schema(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Return ``openapi_extra`` for a route that reads its body by ``read_model``, and register the model's schema."""
    BODIES[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def job_pointer(raw: Any, key: str) -> str:
    """Return the JSON pointer (RFC 6901) of a dotted key, without the union tags that pydantic inserts."""
    if key == "(top level)":
        return ""
    pointer, node = "", raw
    parts = key.split(".")
    for index, part in enumerate(parts):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif index < len(parts) - 1:
            continue
        pointer += step(part)
    return pointer
