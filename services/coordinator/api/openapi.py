"""The OpenAPI document: FastAPI's own, plus problem documents, request bodies of both media types, and security."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.responses import Response

from penstock.services.coordinator.api.http.bodies import BODIES, YAML_TYPES
from penstock.services.coordinator.api.http.replies import Problem
from penstock.services.coordinator.api.scopes import scope_of
from penstock.shared.config.jobs.kinds import KINDS

__all__ = ["Document", "describe", "methods_of"]

_REF = "#/components/schemas/{model}"
_PROBLEMS = {
    "400": "Malformed request.",
    "401": "No valid key.",
    "403": "The key lacks a scope, or the call is not from here.",
    "404": "No such thing.",
    "408": "The body did not come in time.",
    "413": "Body too large.",
    "422": "Not valid; `errors` points at each problem.",
    "429": "Too many requests, in all, at once, or of this size; see Retry-After.",
    "431": "The headers are too long.",
    "500": "A defect.",
    "503": "The bus or the leader does not answer; see Retry-After.",
    "504": "No answer in time.",
}
_BODY_PROBLEMS = {"409": "Not in this state, or a request with this key still runs.", "415": "Unknown content type."}
_IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key and request: the same answer, one effect.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[A-Za-z0-9._~-]+$"},
}


def describe(app: FastAPI, routers: Sequence[APIRouter]) -> dict[str, Any]:
    """Return the document, which is built once per app."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        _add_model(schemas, Problem)
        for model in (*KINDS.values(), *BODIES.values()):
            _add_model(schemas, model)
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}, {}]
        scopes = _scopes(routers)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _complete(path, method, operation)
                if (scope := scopes.get((path, method))) is not None:
                    operation["description"] += f"\n\nNeeds the scope `{scope}`."
        app.openapi_schema = document
    return app.openapi_schema


def _scopes(routers: Sequence[APIRouter]) -> dict[tuple[str, str], str]:
    """Return the scope of each operation that requires one."""
    return {
        (route.path_format, method.lower()): scope
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and (scope := scope_of(route)) is not None
        for method in route.methods or ()
    }


def methods_of(routers: Sequence[APIRouter], path: str) -> list[str]:
    """Return the methods of all routes that match a path; the router itself reports only those of the first match."""
    found: dict[str, None] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path_regex.match(path):
                found |= dict.fromkeys(sorted(route.methods or ()))
    return list(found)


class Document:
    """Handler of ``/openapi.json``: encodes the document once, and answers 304 to clients that have it."""

    def __init__(self, build: Callable[[], dict[str, Any]]) -> None:
        self._build = build
        self._written: tuple[bytes, str] | None = None
        self._building = asyncio.Lock()

    async def __call__(self, request: Request) -> Response:
        """Return the document, or 304."""
        async with self._building:
            if self._written is None:
                self._written = await asyncio.to_thread(self._write)
        data, etag = self._written
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, media_type="application/json", headers=headers)

    def _write(self) -> tuple[bytes, str]:
        data = orjson.dumps(self._build())
        return data, f'"{hashlib.sha256(data).hexdigest()[:16]}"'


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    problems = dict(_PROBLEMS)
    if method in ("post", "patch", "put"):
        problems |= _BODY_PROBLEMS
    if method == "post":
        operation.setdefault("parameters", []).append(_IDEMPOTENCY)
    content = {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}}
    responses = operation["responses"]
    responses.pop("422", None)
    for status, text in problems.items():
        responses.setdefault(status, {"description": text, "content": content})
    if path == "/v1/jobs" and method == "post":
        schema = {"oneOf": [{"$ref": _REF.format(model=model.__name__)} for model in KINDS.values()]}
        types = ("application/json", YAML_TYPES[0])
        operation["requestBody"] = {"required": True, "content": {t: {"schema": schema} for t in types}}


def _add_model(schemas: dict[str, Any], model: type[Any]) -> None:
    schema = model.model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    for part in list(schemas.values()):
        _require_tags(part, schemas)


def _require_tags(part: Any, schemas: dict[str, Any]) -> None:
    """Mark the tag of a union's members as required: it has a default in Python, but clients must send it."""
    if isinstance(part, list):
        for item in part:
            _require_tags(item, schemas)
    if not isinstance(part, dict):
        return
    tag = part.get("discriminator", {})
    if isinstance(tag, dict):
        for reference in tag.get("mapping", {}).values():
            member = schemas[reference.rpartition("/")[2]]
            member["required"] = sorted({*member.get("required", []), tag["propertyName"]})
    for item in part.values():
        _require_tags(item, schemas)
