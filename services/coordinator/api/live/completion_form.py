"""Constrained answers: `response_format`, and a `tool_choice` that forces calls."""

from __future__ import annotations

import re
from typing import Any, Literal

import orjson

from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.protocol.generation import Constraint

__all__ = ["MAX_SCHEMA_BYTES", "MAX_TOOLS", "constraint_of"]

MAX_SCHEMA_BYTES = 64 << 10
"""Largest total size of a request's schemas for constrained answers, as JSON."""
MAX_TOOLS = 128
"""Maximum number of tools of a request with a constrained answer."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
ANY_OBJECT: dict[str, Any] = {"type": "object"}

Field = Literal["response_format", "tool_choice"]


def constraint_of(
    response_format: dict[str, Any] | None,
    *,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str | dict[str, Any] | None = None,
    parallel: bool = True,
) -> Constraint | None:
    """Return the constraint on the answer; None if the answer is free.

    A forced call takes precedence over `response_format`. If calls are optional, an answer is a call or follows
    `response_format`.

    Raises:
        HttpProblem: 400 a field is invalid or unsupported; the error names the field.
    """
    schema = _answer_schema(response_format)
    forced = tool_choice not in (None, "auto", "none")
    if schema is None and not forced:
        return None
    field: Field = "tool_choice" if forced else "response_format"
    callable_ones = _tools(tools or [], tool_choice, field) if tool_choice != "none" else []
    texts = [(name, orjson.dumps(found).decode()) for name, found in callable_ones]
    text = "" if forced or schema is None else orjson.dumps(schema).decode()
    if len(text) + sum(len(found) for _, found in texts) > MAX_SCHEMA_BYTES:
        raise _refused(field, f"the schemas of one request may have {MAX_SCHEMA_BYTES} bytes")
    parallel = parallel and not isinstance(tool_choice, dict)
    return Constraint(asked_by=field, json_schema=text, tools=tuple(texts), parallel=parallel)


def _answer_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        detail = "its type is 'text', 'json_object' or 'json_schema'"
        raise _refused("response_format", detail, code="unsupported_parameter")
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        detail = 'a type of json_schema comes with {"json_schema": {"name": ..., "schema": {...}}}'
        raise _refused("response_format", detail)
    return schema


def _tools(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, field: Field
) -> list[tuple[str, dict[str, Any]]]:
    """Return name and argument schema of each tool that may be called."""
    if len(tools) > MAX_TOOLS:
        raise _refused(field, f"an answer of a given form may call one of at most {MAX_TOOLS} tools")
    found = [_tool(tool, field) for tool in tools]
    if field != "tool_choice":
        return found
    if choice != "required":
        name = _named(choice)
        found = [tool for tool in found if tool[0] == name]
        if not found:
            raise _refused(field, f"there is no tool '{name}' among the request's tools")
    if not found:
        raise _refused(field, "there is no tool to call: name some in tools")
    return found


def _named(choice: str | dict[str, Any] | None) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        detail = 'it is \'auto\', \'none\', \'required\' or {"type": "function", "function": {"name": ...}}'
        raise _refused("tool_choice", detail, code="unsupported_parameter")
    return name


def _tool(tool: dict[str, Any], field: Field) -> tuple[str, dict[str, Any]]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise _refused(field, "each tool has a function with a name of 1 to 64 letters, digits, '_', '.' or '-'")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise _refused(field, f"the parameters of tool '{name}' are a JSON schema, an object")
    return name, {**ANY_OBJECT, **(parameters or {})}


def _refused(field: Field, detail: str, *, code: str = "invalid_schema") -> HttpProblem:
    return HttpProblem(400, code, f"{field}: {detail}", errors=[Flaw(pointer=f"/{field}", detail=detail)])
