"""Tests that judge a generated program, and their format in data rows."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.shared.data.template import missing_field
from penstock.shared.errors import DataError

__all__ = ["CallTest", "CodeTest", "StatementTest", "StreamTest", "parse_tests"]

_FORMS = (
    'Python statements as text, {"stdin": ..., "stdout": ...}, or {"call": ..., "args": [...], "returns": ...} '
    '(also "kwargs")'
)


@dataclass(frozen=True, slots=True)
class StatementTest:
    """Python statements, executed after the program in its namespace. The test passes unless they raise."""

    code: str


@dataclass(frozen=True, slots=True)
class StreamTest:
    """Separate run of the program. The test passes if the program exits with 0 and its output equals ``stdout``, except
    for blanks at line ends."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """Call of the program's function named ``call``. The test passes if the result equals ``returns``."""

    call: str
    returns: Any
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


CodeTest = StatementTest | StreamTest | CallTest


def parse_tests(row: dict[str, Any], name: str, place: str) -> list[CodeTest]:
    """Parse the tests in field ``name``: one test, a list of tests, or either of these as JSON text. ``place`` names
    the row in errors.

    Raises:
        DataError: the row lacks the field, or the field holds no test or an invalid test.
    """
    if name not in row:
        raise DataError(missing_field(place, name, row, "the scorer 'code'"))
    value = row[name]
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(orjson.JSONDecodeError):  # Python statements may begin like this, too
            value = orjson.loads(value)
    items = value if isinstance(value, list) else [value]
    tests = [_parse(item, f"{place}: field '{name}'") for item in items]
    if not tests:
        raise DataError(f"{place}: field '{name}' holds no test: such a row can give no reward")
    return tests


def _parse(item: object, where: str) -> CodeTest:
    if isinstance(item, str) and item.strip():
        return StatementTest(item)
    if isinstance(item, dict):
        # Parquet gives every row all keys of the column, null where a row has none.
        keys = {str(key): value for key, value in item.items() if value is not None or key == "returns"}
        if "call" not in keys:
            keys.pop("returns", None)
        if keys.keys() == {"stdin", "stdout"} and all(isinstance(text, str) for text in keys.values()):
            return StreamTest(**keys)
        if {"call", "returns"} <= keys.keys() <= {"call", "returns", "args", "kwargs"}:
            test = CallTest(**keys)
            if isinstance(test.call, str) and isinstance(test.args, list) and isinstance(test.kwargs, dict):
                return test
    raise DataError(f"{where}: not a test: {str(item)[:80]!r}; write {_FORMS}")
