"""Texts with slots in double braces, ``{{ item.answer }}``, as in graders of OpenAI's format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["check_slots", "fill_slots", "item_fields"]

_SLOT = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_PATH = re.compile(r"(item|sample)((?:\.[A-Za-z_][A-Za-z0-9_]*|\[[0-9]{1,6}\])+)")
_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]+)\]")
_SAMPLE = ("output_text", "output_json")


def check_slots(text: str) -> str:
    """Return ``text``. Raises ValueError if a slot is neither a field of the data row (``item.FIELD``) nor an output of
    the policy (``sample.output_text``, ``sample.output_json``)."""
    for root, steps in _paths(text):
        if root == "sample" and steps[0] not in _SAMPLE:
            raise ValueError(f"'sample.{steps[0]}' does not exist; there are: sample.output_text, sample.output_json")
        if isinstance(steps[0], int):
            raise ValueError(f"'{root}[{steps[0]}]': {root} has fields, no places")
    return text


def item_fields(text: str) -> set[str]:
    """Return the fields of the data row that the slots of ``text`` refer to."""
    return {str(steps[0]) for root, steps in _paths(text) if root == "item"}


def fill_slots(text: str, item: Mapping[str, Any], sample: Mapping[str, Any]) -> str:
    """Fill in the slots of ``text``: strings verbatim, other values as JSON.

    Raises:
        LookupError: the row or the sample lacks a value; the message names it.
    """
    roots = {"item": item, "sample": sample}

    def fill(match: re.Match[str]) -> str:
        root, steps = _path(match[1])
        value: Any = roots[root]
        for step in steps:
            try:
                value = value[step]
            except (LookupError, TypeError):
                raise LookupError(f"there is no '{match[1].strip()}'") from None
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _SLOT.sub(fill, text)


def _paths(text: str) -> Iterator[tuple[str, list[str | int]]]:
    return (_path(match[1]) for match in _SLOT.finditer(text))


def _path(slot: str) -> tuple[str, list[str | int]]:
    found = _PATH.fullmatch(slot.strip())
    if found is None:
        raise ValueError(f"'{{{{{slot[:60]}}}}}' must look like {{{{ item.FIELD }}}} or {{{{ sample.output_text }}}}")
    return found[1], [name or int(place) for name, place in _STEP.findall(found[2])]
