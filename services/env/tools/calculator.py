"""Arithmetic with its own parser: exact fractions and bounded sizes; no input is executed as code.

::

    expression = term {("+" | "-") term}
    term       = factor {("*" | "/") factor}
    factor     = ("+" | "-") factor | power
    power      = percent [("^" | "**") factor]
    percent    = (number | "(" expression ")") {"%"}
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from penstock.services.env.tools.base import CallError
from penstock.shared.config.tools import CalculatorTool

__all__ = ["Calculator", "decimal_text", "evaluate"]

MAX_CHARS = 256
MAX_DEPTH = 32
"""Maximum nesting of parentheses and signs."""
MAX_BITS = 4096
"""Maximum bits of numerator and denominator of every intermediate value."""
_NOISE = re.compile(r"[\s,$_]")
_SYMBOL = re.compile(r"\d+\.?\d*|\.\d+|\*\*|[-+*/^%()]")
_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})


class Calculator:
    """Evaluates expressions: ``{"expression": "48/2"}`` returns 24."""

    def __init__(self, config: CalculatorTool) -> None:
        self._decimals = config.decimals

    def call(self, arguments: dict[str, Any]) -> str:
        """Return the value of the expression as a decimal number. Raises CallError as ``evaluate``."""
        return decimal_text(evaluate(str(arguments["expression"])), self._decimals)

    def close(self) -> None:
        """Do nothing: no resources are held."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression; blanks, commas and dollar signs are ignored.

    Raises:
        CallError: the text is not an expression, divides by zero, or is too large.
    """
    if len(expression) > MAX_CHARS:
        raise CallError(f"an expression has at most {MAX_CHARS} characters")
    return _Parser(_symbols(_NOISE.sub("", expression.translate(_SPELLINGS)))).whole()


def decimal_text(value: Fraction, decimals: int) -> str:
    """Return ``value`` with at most ``decimals`` decimals, rounded half to even, without trailing zeros."""
    scaled = round(abs(value) * 10**decimals)
    sign = "-" if value < 0 and scaled else ""
    digits = str(scaled).rjust(decimals + 1, "0")
    whole, fraction = digits[: len(digits) - decimals], digits[len(digits) - decimals :].rstrip("0")
    return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"


def _symbols(text: str) -> list[str]:
    symbols, place = [], 0
    while place < len(text):
        found = _SYMBOL.match(text, place)
        if found is None:
            raise CallError(f"'{text[place]}' is not part of an expression")
        symbols.append(found.group())
        place = found.end()
    return symbols


class _Parser:
    def __init__(self, symbols: list[str]) -> None:
        self._symbols, self._place, self._depth = symbols, 0, 0

    def whole(self) -> Fraction:
        value = self._expression()
        if self._next():
            raise CallError(f"'{self._next()}' was not expected")
        return value

    def _next(self) -> str:
        return self._symbols[self._place] if self._place < len(self._symbols) else ""

    def _took(self, *symbols: str) -> str:
        found = self._next()
        if found not in symbols:
            return ""
        self._place += 1
        return found

    def _expression(self) -> Fraction:
        value = self._term()
        while sign := self._took("+", "-"):
            term = self._term()
            value = _bounded(value + term if sign == "+" else value - term)
        return value

    def _term(self) -> Fraction:
        value = self._factor()
        while sign := self._took("*", "/"):
            factor = self._factor()
            value = _bounded(value * factor if sign == "*" else _quotient(value, factor))
        return value

    def _factor(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CallError("the expression is nested too deeply")
        sign = self._took("+", "-")
        value = self._factor() if sign else self._power()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Fraction:
        base = self._percent()
        return _raised(base, self._factor()) if self._took("^", "**") else base

    def _percent(self) -> Fraction:
        value = self._primary()
        while self._took("%"):
            value = _bounded(value / 100)
        return value

    def _primary(self) -> Fraction:
        if self._took("("):
            value = self._expression()
            if not self._took(")"):
                raise CallError("a ')' is missing")
            return value
        symbol = self._next()
        if not symbol or not (symbol[0].isdigit() or symbol[0] == "."):
            raise CallError(f"a number was expected, not '{symbol}'" if symbol else "the expression is incomplete")
        self._place += 1
        return Fraction(symbol)


def _quotient(value: Fraction, divisor: Fraction) -> Fraction:
    if not divisor:
        raise CallError("division by zero")
    return value / divisor


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CallError("an exponent must be a whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and abs(exponent) * (bits - 1) > MAX_BITS:
        raise CallError("the number is too large")
    if not base and exponent < 0:
        raise CallError("division by zero")
    return _bounded(Fraction(base ** int(exponent)) if bits > 1 else _small_power(base, int(exponent)))


def _small_power(base: Fraction, exponent: int) -> Fraction:
    """Return a power of -1, 0 or 1 in constant time."""
    if not exponent:
        return Fraction(1)
    return base if exponent % 2 else base * base


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CallError("the number is too large")
    return value
