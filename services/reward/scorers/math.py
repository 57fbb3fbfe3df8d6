"""Scorer for mathematical equality, by the library math-verify."""

from __future__ import annotations

import logging
from typing import Any

from penstock.services.reward.scorers.base import need_answer
from penstock.shared.config.rewards.scorers import MathScorer
from penstock.shared.errors import ScoringError

__all__ = ["Math"]

_FINAL = "####"
"""Text before the final answer of a worked solution in GSM8K."""


class Math:
    """Returns 1 if the final answer of the completion equals the reference, else 0.

    The library's own timeouts stay off: they need signals in the main thread, and the scorer process is killed at its
    limit anyway.
    """

    def __init__(self, config: MathScorer) -> None:
        """Import math-verify and warm it up. Raises ScoringError if it is not installed."""
        try:
            from math_verify import parse, verify
        except ImportError as error:
            raise ScoringError(f"scorer 'math' needs the extra `penstock[reward]`: {error}") from None
        for module in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(module).setLevel(logging.ERROR)  # it warns about disabled timeouts
        self._parse, self._verify = parse, verify
        self._parse("\\frac{1}{2}", parsing_timeout=None)  # the first parse builds grammars (50 ms)

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        """Return 1 if the final answer of the completion equals the reference answer, else 0.

        Raises:
            ScoringError: the reference contains no mathematical answer.
        """
        reference = need_answer(answer, "math").rpartition(_FINAL)[2]
        gold = self._parse(reference, parsing_timeout=None)
        if not gold:
            raise ScoringError(f"scorer 'math' finds no number or expression in the reference answer {reference!r}")
        found = self._parse(completion.rpartition(_FINAL)[2], parsing_timeout=None)
        return float(bool(found) and self._verify(gold, found, timeout_seconds=None))
