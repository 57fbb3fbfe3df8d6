"""Regular expressions of users that anybody's text may be searched with: their time grows with the text and no faster.

They are written as for Python and read by RE2, which knows ASCII alone in its classes: those are spelt out.
"""

from __future__ import annotations

import re
from typing import Any

import re2

__all__ = ["compile_pattern"]

CLASSES = {"w": r"\p{L}\p{M}\p{N}_", "d": r"\p{Nd}", "s": r"\s\x1c-\x1f\x{85}\p{Z}"}
"""Python's meaning of these classes, and combining marks: a match too many is better than one too few."""
OUTSIDE = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
INSIDE = re.compile(r"\\.|.", re.DOTALL)
"""Parts of a pattern outside and inside of brackets; a bracket that closes may come first in them as a character."""


def compile_pattern(pattern: str) -> Any:
    """A pattern with the ``search`` and ``finditer`` of ``re``. Raises ValueError: RE2 cannot read it."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(_spelt_out(pattern), options)
    except re2.error as error:
        why = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"not a regular expression of RE2: {why}") from None


def _spelt_out(pattern: str) -> str:
    """``pattern`` with the classes `\\w`, `\\d`, `\\s` and their opposites as Python has them."""
    parts, place, bracket = list[str](), 0, ""
    while found := (INSIDE if bracket else OUTSIDE).match(pattern, place):
        part, place = found[0], found.end()
        if len(part) == 2 and part[0] == "\\":
            part = _escape(part, bracket)
        elif part == "[" and bracket:
            part = r"\["
        elif part[0] == "[":
            bracket = part
        elif part == "]":
            bracket = ""
        parts.append(part)
    return "".join(parts)


def _escape(part: str, bracket: str) -> str:
    """``bracket`` is how the brackets around it begin; '' where there are none."""
    name = part[1].lower()
    if name == "b" and not bracket:
        raise ValueError(f"'{part}' knows ASCII letters alone: leave it out, or write what may stand there")
    if name not in CLASSES:
        return part
    if part[1] == name:
        return CLASSES[name] if bracket else f"[{CLASSES[name]}]"
    if not bracket:
        return f"[^{CLASSES[name]}]"
    if bracket.startswith("[^"):
        raise ValueError(f"'{part}' in brackets that begin with '[^': write what is meant, like '\\pL' for letters")
    return part  # of ASCII alone, so more is found
