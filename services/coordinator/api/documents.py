"""JSON and YAML from strangers: bounded in depth and size, and nothing in it that JSON could not say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import orjson
import yaml
from pydantic import ValidationError

from penstock.services.coordinator.api.replies import Flaw, HttpProblem

__all__ = ["MAX_DEPTH", "MAX_FLAWS", "MAX_VALUES", "bound_values", "from_json", "from_yaml", "step", "too_many_flaws"]

MAX_VALUES, MAX_DEPTH = 100_000, 64
"""Bounds of a document; YAML aliases can make a short text enormous."""

MAX_FLAWS = 1000
"""A body with more flaws is refused without a list of them: making it takes longer than reading the body."""

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def from_json(body: bytes) -> Any:
    """Parse JSON. Raises HttpProblem: 400 not JSON, 422 beyond the bounds."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HttpProblem(400, "malformed_json", f"the body is not valid JSON: {error}") from None
    _check(data)
    return data


def from_yaml(body: bytes) -> Any:
    """Parse YAML. Raises HttpProblem: 400 not YAML, 422 beyond the bounds or without a JSON form."""
    try:
        _check_depth(body)
        data = yaml.load(body, Loader=_SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise HttpProblem(400, "malformed_yaml", f"the body is not valid YAML{place}: {problem}") from None
    _check(data)
    return data


def bound_values(data: Any, most: int) -> None:
    """Refuse parsed JSON with more than ``most`` values. Raises HttpProblem: 422."""
    seen, open_ones = 1, [data]
    while open_ones:
        value = open_ones.pop()
        if isinstance(value, dict | list):
            seen += len(value)
            if seen > most:
                raise HttpProblem(422, "too_complex", f"the document has more than {most} values")
            open_ones.extend(value.values() if isinstance(value, dict) else value)


def too_many_flaws(error: ValidationError) -> HttpProblem | None:
    """What to say of a body that has more flaws than can be listed."""
    count = error.error_count()
    if count <= MAX_FLAWS:
        return None
    detail = f"the body is not valid: it has {count} flaws, too many to list"
    return HttpProblem(422, "invalid_body", detail, errors=[Flaw(pointer="", detail=detail)])


def step(part: str) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return "/" + part.replace("~", "~0").replace("/", "~1")


def _check_depth(body: bytes) -> None:
    """The composer of libyaml recurses on the C stack and would take the process down; its event parser does not."""
    depth = 0
    for count, event in enumerate(yaml.parse(body, Loader=_SafeLoader)):
        if count > MAX_VALUES:
            raise _too_complex()
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_complex()
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check(data: Any) -> None:
    level = [("", data)]
    seen = 0
    for _ in range(MAX_DEPTH + 1):
        seen += len(level)
        if seen > MAX_VALUES:
            raise _too_complex()
        below: list[tuple[str, Any]] = []
        for pointer, value in level:
            below.extend(_children(pointer, value))
            if len(below) > MAX_VALUES:
                raise _too_complex()
        if not below:
            return
        level = below
    raise _too_complex()


def _children(pointer: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _not_json(pointer, f"the key {key!r} must be a string; put it in quotes")
            yield pointer + step(key), item
    elif isinstance(value, list):
        yield from ((f"{pointer}/{index}", item) for index, item in enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        raise _not_json(pointer, "must be a finite number")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise _not_json(pointer, "must fit in 64 bits")
    elif not (value is None or isinstance(value, str | int | float)):
        raise _not_json(pointer, f"a {type(value).__name__} has no JSON form; put the value in quotes")


def _too_complex() -> HttpProblem:
    return HttpProblem(422, "too_complex", f"the document has more than {MAX_VALUES} values or {MAX_DEPTH} levels")


def _not_json(pointer: str, detail: str) -> HttpProblem:
    return HttpProblem(422, "invalid_job", f"{pointer or '/'}: {detail}", errors=[Flaw(pointer=pointer, detail=detail)])
