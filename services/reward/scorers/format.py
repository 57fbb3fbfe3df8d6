"""Scorer that matches a regular expression against the whole completion."""

from __future__ import annotations

import re
from typing import Any

from penstock.shared.config.rewards.scorers import FormatScorer

__all__ = ["Format"]


class Format:
    """Returns 1 if the whole completion matches the pattern, else 0; `.` matches newlines."""

    def __init__(self, config: FormatScorer) -> None:
        self._pattern = re.compile(config.pattern, re.DOTALL)

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        """Return 1 if the whole completion matches the pattern, else 0."""
        return float(self._pattern.fullmatch(completion) is not None)
