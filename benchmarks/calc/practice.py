"""Expressions to practise that nobody annotated: a checker can judge them all the same.

Each is an expression of the train file whose numbers are replaced by other ones of the same length that occur there,
frequent ones more often, so that shapes and numbers are those of the file.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

__all__ = ["value_of", "write_practice"]

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NUMBER = re.compile(r"\d*\.?\d+")
_TRIES = 100
"""For each expression."""
_MAX_DIGITS = 5
"""With a point and the end of text an answer is within the seven tokens that may be sampled."""


def write_practice(path: Path, patterns: Sequence[str], known: frozenset[str], *, count: int, seed: int) -> None:
    """``count`` distinct rows ``{"prompt", "answer"}`` with the shapes of ``patterns``, none of them in ``known``.

    Raises:
        ValueError: there are not so many.
    """
    rng = random.Random(seed)
    numbers: defaultdict[int, list[str]] = defaultdict(list)
    for number in (number for pattern in patterns for number in _NUMBER.findall(pattern)):
        numbers[len(number)].append(number)
    found: dict[str, str] = {}
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        made = _NUMBER.sub(lambda match: rng.choice(numbers[len(match.group())]), rng.choice(patterns))
        answer = None if made in known or made in found else value_of(made)
        if answer is not None:
            found[made] = answer
    if len(found) < count:
        raise ValueError(f"only {len(found)} expressions were found")
    path.write_text("".join(json.dumps({"prompt": f"{e}=", "answer": a}) + "\n" for e, a in found.items()))


def value_of(expression: str) -> str | None:
    """Its value as GSM8K writes it; None where it is negative, no short decimal fraction, or not arithmetic."""
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None
    scaled = value * 10**_MAX_DIGITS
    if value < 0 or scaled.denominator != 1:
        return None
    whole, fraction = divmod(int(scaled), 10**_MAX_DIGITS)
    decimals = f"{fraction:0{_MAX_DIGITS}d}".rstrip("0")
    if len(str(whole)) + len(decimals) > _MAX_DIGITS:
        return None
    return f"{whole}.{decimals}" if decimals else str(whole)


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    raise ValueError(f"{type(node).__name__} is no arithmetic")
