"""Calculator annotations of GSM8K (arXiv 2110.14168, §3.2): ``<<48/2=24>>`` becomes prompt `48/2=`, answer `24`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from penstock.shared.config.data import CalculatorSource
from penstock.shared.data.files import read_json_lines
from penstock.shared.errors import DataError

__all__ = ["CalculatorRows", "find_annotations", "normalize", "open_calculator"]

_ANNOTATION = re.compile(r"<<([^<>]*)>>")
_NOISE = re.compile(r"[\s,$]")
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")


class CalculatorRows:
    """Unique expressions in order of first occurrence: ``prompt`` `48/2=`, ``expression`` `48/2`, ``answer`` `24`."""

    endless = False

    def __init__(self, name: str, pairs: list[tuple[str, str]], notes: tuple[str, ...]) -> None:
        self.name = name
        self.notes = notes
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        expression, value = self._pairs[index]
        return {"prompt": f"{expression}=", "expression": expression, "answer": value}

    def where(self, index: int) -> str:
        """Return the file and the expression."""
        return f"{self.name}, expression '{self._pairs[index][0]}'"


def normalize(text: str) -> str:
    """Normalise arithmetic: remove blanks, commas and dollar signs, and write equal numbers (`.50`, `0.5`) in the same
    way."""
    return _NUMBER.sub(_one_number, _NOISE.sub("", text))


def _one_number(match: re.Match[str]) -> str:
    whole, _, fraction = match.group().partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def find_annotations(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every well-formed ``(expression, value)`` of a GSM8K file, normalised, repetitions included.

    Raises:
        DataError: the file cannot be read, or a row has no text field `answer`.
    """
    for number, line in read_json_lines(path):
        row = orjson.loads(line)
        answer = row.get("answer")
        if not isinstance(answer, str):
            fields = ", ".join(sorted(row)) or "none"
            raise DataError(f"{path}, line {number}: no text field 'answer'; the row has: {fields}")
        for match in _ANNOTATION.finditer(answer):
            expression, equals, value = normalize(match.group(1)).partition("=")
            if expression and equals and value and "=" not in value:
                yield expression, value


def open_calculator(source: CalculatorSource) -> CalculatorRows:
    """Return the rows of ``source``; their ``notes`` state how many expressions were left out, and why.

    Raises:
        DataError: a file cannot be read, or no expression remains.
    """
    excluded = (
        frozenset(e for e, _ in find_annotations(Path(source.exclude_path))) if source.exclude_path else frozenset()
    )
    values: dict[str, str] = {}
    left_out: dict[str, set[str]] = {"excluded": set(), "too long": set(), "contradictory": set()}
    for expression, value in find_annotations(Path(source.path)):
        if expression in excluded:
            left_out["excluded"].add(expression)
        elif len(expression) > source.max_chars:
            left_out["too long"].add(expression)
        elif values.setdefault(expression, value) != value:
            left_out["contradictory"].add(expression)
    pairs = [(e, v) for e, v in values.items() if e not in left_out["contradictory"]][source.skip :][: source.limit]
    counts = Counter({reason: len(found) for reason, found in left_out.items() if found})
    notes = tuple(f"{source.path}: {count} expressions left out ({reason})" for reason, count in counts.items())
    if not pairs:
        raise DataError(f"{source.path}: no calculator expression remains" + (f"; {'; '.join(notes)}" if notes else ""))
    return CalculatorRows(source.path, pairs, notes)
