"""Arithmetic over named numbers, for ``calculate_output`` of a multi grader."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

__all__ = ["FUNCTIONS", "Formula"]

MAX_CHARS, MAX_DEPTH = 1000, 100
FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt,
    "log": math.log,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


class Formula:
    """Parsed formula such as ``0.7 * tests + 0.3 * style``, with ``+ - * / ^``, parentheses, and ``FUNCTIONS`` over
    floats."""

    def __init__(self, text: str) -> None:
        """Parse ``text``. Raises ValueError if ``text`` has anything but arithmetic over named numbers."""
        if len(text) > MAX_CHARS:
            raise ValueError(f"a formula has at most {MAX_CHARS} characters")
        try:
            self._tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
            self.names = frozenset(_names(self._tree))
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"'{text[:80]}' is not a formula") from None

    def value(self, numbers: Mapping[str, float]) -> float:
        """Evaluate the formula for ``numbers``, which must contain all ``names``.

        Raises:
            ValueError: the formula or one of its subexpressions has no finite real value.
        """
        try:
            return _value(self._tree, numbers)
        except ArithmeticError as error:
            raise ValueError(f"the formula has no value: {error}") from None


def _names(node: ast.expr, depth: int = 0) -> list[str]:
    """Return the names of numbers in a formula. Raises ValueError for anything but arithmetic."""
    if depth > MAX_DEPTH:
        raise ValueError(f"a formula nests at most {MAX_DEPTH} levels")
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return [*_names(left, depth + 1), *_names(right, depth + 1)]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _names(operand, depth + 1)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS and args:
            if len(args) > 1 and name not in ("min", "max"):
                raise ValueError(f"in a formula {name}() takes one number")
            return [found for arg in args for found in _names(arg, depth + 1)]
        case ast.Name(id=name):
            return [name]
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return []
    raise ValueError(
        f"'{ast.unparse(node)[:80]}' cannot stand in a formula: use numbers, names of graders, + - * / ^ and "
        f"{', '.join(FUNCTIONS)}"
    )


def _value(node: ast.expr, numbers: Mapping[str, float]) -> float:
    """Return the value of a node of the formula's tree. Raises ArithmeticError if any subexpression is not a finite
    real number."""
    found = _applied(node, numbers)
    if isinstance(found, complex) or not math.isfinite(found):
        raise ArithmeticError(f"{ast.unparse(node)[:80]} is {found}, not a finite number")
    return float(found)


def _applied(node: ast.expr, numbers: Mapping[str, float]) -> float | complex:
    """Apply one operation to its operands. An even root of a negative number gives a complex number."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, numbers), _value(right, numbers))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, numbers))
        case ast.Call(func=ast.Name(id=name), args=[only]):
            return _single(name, _value(only, numbers))
        case ast.Call(func=ast.Name(id=name), args=args):
            return FUNCTIONS[name](*(_value(arg, numbers) for arg in args))
        case ast.Name(id=name):
            return float(numbers[name])
        case ast.Constant(value=int() | float() as value):
            return float(value)
    raise AssertionError(f"checked when it was parsed: {ast.dump(node)}")


def _single(name: str, number: float) -> float:
    """Apply a function to one argument; ``min`` and ``max`` return it unchanged."""
    if name in ("min", "max"):
        return number
    try:
        return float(FUNCTIONS[name](number))
    except ValueError:
        raise ArithmeticError(f"{name}({number:g}) is not defined") from None
