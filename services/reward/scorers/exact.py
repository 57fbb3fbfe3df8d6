"""Scorer for equality with the reference answer."""

from __future__ import annotations

from typing import Any

from penstock.services.reward.scorers.base import need_answer
from penstock.shared.config.rewards.scorers import ExactScorer

__all__ = ["Exact"]


class Exact:
    """Returns 1 if the completion equals the answer, both without surrounding blanks, else 0."""

    def __init__(self, config: ExactScorer) -> None:
        self._ignore_case = config.ignore_case

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        """Return 1 if the completion equals the reference answer, else 0."""
        found, wanted = completion.strip(), need_answer(answer, "exact").strip()
        if self._ignore_case:
            found, wanted = found.casefold(), wanted.casefold()
        return float(found == wanted)
