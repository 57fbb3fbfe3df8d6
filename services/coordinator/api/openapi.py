"""The OpenAPI document: FastAPI's document, extended by problem documents, the security scheme, and request bodies in
both media types (JSON and YAML)."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.responses import Response

from penstock.services.coordinator.api.dashboard import HEADERS
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
    """Return the OpenAPI document of ``app``; the first call builds it."""
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
    """Return the methods of all routes that match ``path``. Starlette reports only the methods of the first match."""
    found: dict[str, None] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path_regex.match(path):
                found |= dict.fromkeys(sorted(route.methods or ()))
    return list(found)


class Document:
    """Handlers of ``/openapi.json`` and ``/docs``: encode the document once, and answer 304 to clients that have it."""

    def __init__(self, build: Callable[[], dict[str, Any]]) -> None:
        self._build = build
        self._written: tuple[bytes, bytes, str] | None = None
        self._building = asyncio.Lock()

    async def __call__(self, request: Request) -> Response:
        """Return the document, or 304."""
        data, _, etag = await self._both()
        return _reply(request, data, "application/json", {"ETag": etag, "Cache-Control": "no-cache"})

    async def page(self, request: Request) -> Response:
        """Return the document as a page for people, or 304."""
        _, data, etag = await self._both()
        return _reply(request, data, "text/html; charset=utf-8", HEADERS | {"ETag": etag})

    async def _both(self) -> tuple[bytes, bytes, str]:
        async with self._building:
            if self._written is None:
                self._written = await asyncio.to_thread(self._write)
        return self._written

    def _write(self) -> tuple[bytes, bytes, str]:
        document = self._build()
        data = orjson.dumps(document)
        return data, _page(document).encode(), f'"{hashlib.sha256(data).hexdigest()[:16]}"'


def _reply(request: Request, data: bytes, media_type: str, headers: dict[str, str]) -> Response:
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=media_type, headers=headers)


_HEAD = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark"><title>HTTP API · Penstock</title>
  <link rel="icon" href="/assets/icon.svg" type="image/svg+xml"><link rel="stylesheet" href="/assets/style.css">
</head>
<body><main><h1>HTTP API of Penstock {version}</h1>
<p>For programs: <a href="/openapi.json">/openapi.json</a>, with the schemas of all bodies. To watch jobs:
<a href="/">the dashboard</a>. Requests send <code>Authorization: Bearer KEY</code>.</p>
"""


def _page(document: dict[str, Any]) -> str:
    """Return the document as one HTML page without scripts: every operation with its parameters and body."""
    paths = document["paths"].items()
    parts = [_section(path, method, one) for path, operations in paths for method, one in operations.items()]
    return _HEAD.format(version=escape(document["info"]["version"])) + "\n".join(parts) + "\n</main></body></html>\n"


def _section(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        (one["name"], one["in"] + (", required" if one.get("required") else ""), one.get("description", ""))
        for one in operation.get("parameters", ())
    ]
    rows += [
        ("body", media_type, _type_of(content.get("schema", {})))
        for media_type, content in operation.get("requestBody", {}).get("content", {}).items()
    ]
    lines = [
        f"<tr><td><code>{escape(name)}</code></td><td>{where}</td><td>{_text(description)}</td></tr>"
        for name, where, description in rows
    ]
    paragraphs = "".join(f"<p>{_text(part)}</p>" for part in operation.get("description", "").split("\n\n"))
    table = f"<table><tbody>{''.join(lines)}</tbody></table>" if lines else ""
    summary = f"<code>{method.upper()} {escape(path)}</code> {_text(operation.get('summary', ''))}"
    return f"<details><summary>{summary}</summary>{paragraphs}{table}</details>"


def _text(markdown: str) -> str:
    return re.sub(r"(`+)([^`]+)\1", r"<code>\2</code>", escape(markdown))


def _type_of(schema: dict[str, Any]) -> str:
    """Return a readable name of a JSON schema, for the HTML page."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    members = schema.get("oneOf") or schema.get("anyOf")
    return " or ".join(map(_type_of, members)) if members else str(schema.get("title") or schema.get("type") or "any")


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
    """Mark the discriminator of each union as required in the union's members. Pydantic does not, because the field has
    a default in Python."""
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
