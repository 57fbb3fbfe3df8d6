"""Search and replacement of text that must not be stored. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.shared.config.online.patterns import compile_pattern
from penstock.shared.config.online.redaction import RedactionConfig
from penstock.shared.errors import DataError

__all__ = ["Finder", "Found", "Redactor"]

Finder = Callable[[str], Iterable[tuple[int, int, str]]]
"""Function that returns ``(start, end, name)`` of each match in a text: its characters [start, end) and its kind."""


@dataclass(frozen=True, slots=True)
class Found:
    """A match: characters [start, end) of a text, and the name of the pattern."""

    start: int
    end: int
    name: str


class Redactor:
    """Applies the patterns of a config, and a function of the user if there is one."""

    def __init__(self, config: RedactionConfig, function: Finder | None = None) -> None:
        self._patterns = [(name, compile_pattern(pattern)) for name, pattern in config.patterns.items()]
        self._function = function

    def find(self, text: str) -> list[Found]:
        """Return the matches in order of position; overlapping matches are merged under the name of the first.

        Raises:
            DataError: the function raised an error, or returned an invalid range.
        """
        legal = text.encode("utf-8", "replace").decode()  # same length, without lone surrogates
        places = [
            Found(match.start(), match.end(), name)
            for name, pattern in self._patterns
            for match in pattern.finditer(legal)
        ]
        if self._function is not None:
            places += _places(self._function, text)
        found: list[Found] = []
        for place in sorted(places, key=lambda place: (place.start, -place.end)):
            if place.start == place.end:
                continue
            if found and place.start < found[-1].end:
                found[-1] = Found(found[-1].start, max(found[-1].end, place.end), found[-1].name)
            else:
                found.append(place)
        return found

    def replace(self, text: str) -> str:
        """Return ``text`` with each match replaced by `[NAME]`. Raises DataError, see ``find``."""
        parts, end = list[str](), 0
        for place in self.find(text):
            parts += [text[end : place.start], f"[{place.name}]"]
            end = place.end
        return "".join([*parts, text[end:]])

    def replace_all(self, value: Any) -> Any:
        """Return a copy of a JSON value with matches replaced in every string; keys are not changed."""
        if isinstance(value, str):
            return self.replace(value)
        if isinstance(value, dict):
            return {key: self.replace_all(item) for key, item in value.items()}
        return [self.replace_all(item) for item in value] if isinstance(value, list) else value


def _places(function: Finder, text: str) -> list[Found]:
    try:
        found = [Found(int(start), int(end), str(name)) for start, end, name in function(text)]
    except Exception as error:  # code of the user may raise anything
        raise DataError(f"the redaction function failed: {error!r}") from error
    wrong = next((place for place in found if not 0 <= place.start <= place.end <= len(text)), None)
    if wrong is not None:
        raise DataError(f"the redaction function found [{wrong.start}, {wrong.end}) in {len(text)} characters")
    return found
