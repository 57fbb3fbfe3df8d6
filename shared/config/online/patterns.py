"""Regular expressions that users write for untrusted text, matched in linear time by RE2.

Patterns have Python's syntax. RE2's character classes are ASCII only, so Unicode classes replace them.
"""

from __future__ import annotations

import re
from typing import Any

import re2

__all__ = ["compile_pattern"]

CLASSES = {"w": r"\p{L}\p{M}\p{N}_", "d": r"\p{Nd}", "s": r"\s\x1c-\x1f\x{85}\p{Z}"}
"""RE2 equivalents of Python's character classes, by letter. The class of words also has combining marks, because a
false match is better than a missed one."""
OUTSIDE = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
INSIDE = re.compile(r"\\.|.", re.DOTALL)
"""``OUTSIDE`` matches the next token of a pattern outside of brackets, ``INSIDE`` the next token inside of brackets.
``[]`` and ``[^]`` are opening tokens, because a ``]`` directly after ``[`` or ``[^`` is a literal."""


def compile_pattern(pattern: str) -> Any:
    """Compile a pattern to an object with the ``search`` and ``finditer`` of ``re``. Raises ValueError if RE2
    rejects it."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(_spelt_out(pattern), options)
    except re2.error as error:
        why = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"not a regular expression of RE2: {why}") from None


def _spelt_out(pattern: str) -> str:
    r"""Replace the classes `\w`, `\d`, `\s` and their complements in ``pattern`` by their Unicode equivalents."""
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
    """Return the RE2 equivalent of the escape sequence ``part``. ``bracket`` is the opening token of the enclosing
    character class, such as `[^`; '' outside of a class."""
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
    return part  # ASCII only, so the pattern matches more than in Python
