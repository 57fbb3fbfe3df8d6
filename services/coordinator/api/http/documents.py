"""JSON and YAML from untrusted clients: bounded in depth and size, and limited to values that JSON can express."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import yaml
from pydantic import ValidationError

from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.config.base import YAMLLoader

__all__ = [
    "MAX_DEPTH", "MAX_FLAWS", "MAX_VALUES", "bound_values", "count_values", "from_json", "from_yaml", "items_of",
    "step", "too_many_flaws",
]  # fmt: skip

MAX_VALUES, MAX_DEPTH = 100_000, 64
"""Maximum number of values and maximum depth of a document; YAML aliases can expand a short text to an enormous one."""

MAX_YAML_VALUES = 20_000
"""Maximum number of values of a YAML document. Composing YAML blocks the process, so larger documents must be JSON."""
CHUNK_BYTES = 1 << 20
"""Number of bytes of a JSON text that are scanned at a time."""

MAX_FLAWS = 1000
"""Largest number of flaws that are listed: building a longer list would take longer than reading the body."""


def from_json(body: bytes) -> Any:
    """Parse JSON. Raises HttpProblem: 400 not JSON, 422 too many values or too deep."""
    if count_values(body) > MAX_VALUES:
        raise _too_complex()
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HttpProblem(400, "malformed_json", f"the body is not valid JSON: {error}") from None
    _check(data)
    return data


def from_yaml(body: bytes) -> Any:
    """Parse YAML. Raises HttpProblem: 400 not YAML, 422 too many values, too deep, or a value without a JSON form."""
    try:
        _check_depth(body)
        data = yaml.load(body, Loader=YAMLLoader)  # a safe loader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise HttpProblem(400, "malformed_yaml", f"the body is not valid YAML{place}: {problem}") from None
    _check(data)
    return data


def bound_values(body: bytes, most: int) -> None:
    """Before parsing, refuse a JSON text that has more than ``most`` values. Raises HttpProblem: 422."""
    if count_values(body) > most:
        raise HttpProblem(422, "too_complex", f"the document has more than {most} values")


def count_values(body: bytes) -> int:
    """Return an upper bound of the number of values in a JSON text.

    A result above MAX_VALUES is exact, except that empty lists and objects count twice. For a text that is not JSON
    the result is arbitrary. Callers count before they parse, because parsing a few megabytes can create millions of
    objects in one blocking call.
    """
    at_most = 1 + body.count(b",") + body.count(b"[") + body.count(b"{")
    if at_most <= MAX_VALUES:
        return at_most
    found, is_inside = 1, 0
    text = _without_escapes(body)
    for start in range(0, len(text), CHUNK_BYTES):
        outside, codes, is_inside = _outside(text[start : start + CHUNK_BYTES], is_inside)
        found += int(np.count_nonzero(((codes == _COMMA) | (codes == _LIST) | (codes == _OBJECT)) & outside))
    return found


def items_of(body: bytes, most: int) -> list[bytes]:
    """Split a JSON array into the texts of its items. If the array is not valid JSON, at least one of the texts is
    invalid, too.

    Raises:
        HttpProblem: 400 not JSON, 413 more than ``most`` items, 422 not an array.
    """
    text = body.strip(b" \t\r\n")
    if not text.startswith(b"["):
        raise HttpProblem(
            422, "invalid_body", "the body must be an array", errors=[Flaw(pointer="", detail="no array")]
        )
    is_inside, depth, places, masked = 0, 0, list[int](), _without_escapes(text)
    for start in range(0, len(text), CHUNK_BYTES):
        outside, codes, is_inside = _outside(masked[start : start + CHUNK_BYTES], is_inside)
        deeper = ((codes == _LIST) | (codes == _OBJECT)) & outside
        higher = ((codes == _LIST_END) | (codes == _OBJECT_END)) & outside
        depths = depth + np.cumsum(deeper.astype(np.int32) - higher.astype(np.int32))
        ends = ((codes == _COMMA) & outside & (depths == 1)) | (higher & (depths == 0))
        places += (start + np.flatnonzero(ends)[: most + 2]).tolist()
        depth = int(depths[-1])
        if len(places) > most:
            raise HttpProblem(413, "too_many_items", f"a batch has at most {most} items, found more")
    if depth != 0 or not places or places[-1] != len(text) - 1:
        raise HttpProblem(400, "malformed_json", "the body is not valid JSON: its brackets do not match")
    if not text[1:-1].strip(b" \t\r\n"):
        return []
    return [text[begin + 1 : end] for begin, end in zip([0, *places[:-1]], places, strict=True)]


_COMMA, _LIST, _OBJECT, _LIST_END, _OBJECT_END, _QUOTE = b',[{]}"'


def _without_escapes(text: bytes) -> bytes:
    """Return a JSON text with its escaped backslashes and quotes replaced by blanks."""
    return text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in text else text


def _outside(piece: bytes, is_inside: int) -> tuple[Any, Any, int]:
    """Return ``(outside, codes, is_inside)`` for ``piece``, a part of a JSON text. ``codes`` has the bytes of
    ``piece``, ``outside`` is True for each byte outside of strings, and ``is_inside`` is 1 if ``piece`` ends inside a
    string. Pass this ``is_inside`` with the next piece."""
    codes = np.frombuffer(piece, np.uint8)
    inside = (np.cumsum(codes == _QUOTE, dtype=np.uint8) + is_inside) & 1
    return inside == 0, codes, int(inside[-1]) if len(piece) else is_inside


def too_many_flaws(error: ValidationError) -> HttpProblem | None:
    """Return the problem for a body with too many flaws to list, or None."""
    count = error.error_count()
    if count <= MAX_FLAWS:
        return None
    detail = f"the body is not valid: it has {count} flaws, too many to list"
    return HttpProblem(422, "invalid_body", detail, errors=[Flaw(pointer="", detail=detail)])


def step(part: str) -> str:
    """Return a key or index as one step of a JSON pointer (RFC 6901), escaped and with its slash."""
    return "/" + part.replace("~", "~0").replace("/", "~1")


def _check_depth(body: bytes) -> None:
    """Refuse deep or long YAML by scanning it, before libyaml's composer reads it: the composer recurses on the C stack
    and could crash."""
    depth = 0
    try:
        for count, event in enumerate(yaml.parse(body, Loader=YAMLLoader)):
            if count > MAX_YAML_VALUES:
                raise _too_complex(MAX_YAML_VALUES)
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise _too_complex()
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.MarkedYAMLError as error:
        if "nesting depth" in (error.problem or ""):  # newer versions of libyaml have a bound of their own
            raise _too_complex() from None
        raise


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


def _too_complex(most: int = MAX_VALUES) -> HttpProblem:
    return HttpProblem(422, "too_complex", f"the document has more than {most} values or {MAX_DEPTH} levels")


def _not_json(pointer: str, detail: str) -> HttpProblem:
    return HttpProblem(422, "invalid_job", f"{pointer or '/'}: {detail}", errors=[Flaw(pointer=pointer, detail=detail)])
