"""Format strings over the fields of a row, with errors that name the field and the row."""

from __future__ import annotations

import re
import string
from typing import Any

from penstock.shared.errors import DataError

__all__ = ["Template"]

MAX_WIDTH = 1000
"""Largest width or precision in a placeholder, so that no job file produces a prompt of gigabytes."""
_FIRST_NAME = re.compile(r"[^.\[]*")
_NUMBER = re.compile(r"\d+")


class _BoundedFormatter(string.Formatter):
    """``str.format`` with bounded widths and precisions, including those that come from the row (``{a:>{b}}``)."""

    def format_field(self, value: Any, format_spec: str) -> str:
        for number in _NUMBER.findall(format_spec):
            if len(number) > len(str(MAX_WIDTH)) or int(number) > MAX_WIDTH:
                raise ValueError(f"'{number[:20]}' in a placeholder is above the largest width, {MAX_WIDTH}")
        return format(value, format_spec)


_FORMATTER = _BoundedFormatter()


class Template:
    """Python format string such as ``Question: {question}``; fields are looked up in a row."""

    def __init__(self, text: str, where: str) -> None:
        """Parse a template. ``where`` is the configuration key, for messages.

        Raises:
            DataError: the text is not a format string, or a placeholder has no field name.
        """
        self._text = text
        self._where = where
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise DataError(f"{where}: '{text}' is not a format string: {error}; write {{{{ for a brace") from None
        self.fields = tuple(dict.fromkeys(match[0] for name in names if (match := _FIRST_NAME.match(name))))
        if any(not name or name.isdigit() for name in self.fields):
            raise DataError(f"{where}: '{text}' has a placeholder without a field name")

    def render(self, row: dict[str, Any], place: str) -> str:
        """Return the text with the fields of ``row`` filled in; ``place`` names the row in errors.

        Raises:
            DataError: the row lacks a field, or the value cannot be formatted that way.
        """
        for name in self.fields:
            if name not in row:
                raise DataError(missing_field(place, name, row, self._where))
        try:
            return _FORMATTER.vformat(self._text, (), row)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DataError(f"{place}: {self._where} '{self._text}' cannot be filled in: {error}") from None


def missing_field(place: str, name: str, row: dict[str, Any], where: str) -> str:
    """Return the error message for a row that lacks the field ``name``. ``where`` is the configuration key that needs
    the field."""
    fields = ", ".join(sorted(row)) or "none"
    return f"{place}: the row has no field '{name}' that {where} needs; its fields: {fields}"
