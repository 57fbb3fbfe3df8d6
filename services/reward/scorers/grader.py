"""Scorer that runs a grader in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.services.reward.scorers.grader_parts import (
    GradingError,
    OpenPart,
    PythonPart,
    Score,
    StringCheck,
    TextSimilarity,
    sample_of,
)
from penstock.shared.config.rewards.graders import (
    Part,
    PythonGrader,
    StringCheckGrader,
    TextSimilarityGrader,
    parts_of,
    total_of,
)
from penstock.shared.config.rewards.scorers import GraderScorer
from penstock.shared.errors import ScoringError

__all__ = ["OpenGrader"]


class OpenGrader:
    """Grades all completions of a group before one deadline."""

    def __init__(self, config: GraderScorer) -> None:
        """Open all parts of the grader. Raises GradingError if a part cannot be opened."""
        self._config = config
        self._parts: dict[str, OpenPart] = {}
        try:
            for name, part in parts_of(config.grader).items():
                self._parts[name] = _open(part, config)
        except GradingError:
            self.close()
            raise
        self.about = f"{config.grader.type} '{config.grader.name}'"

    def close(self) -> None:
        """Release processes and connections."""
        for part in self._parts.values():
            part.close()

    def score_group(
        self, prompt: str, completions: Sequence[str], answer: str | None, row: dict[str, Any]
    ) -> Sequence[float | ScoringError]:
        """Return the value of the grader's formula for each completion; an error of one part fails the completion."""
        deadline = time.monotonic() + self._config.deadline_s
        samples = [sample_of(completion) for completion in completions]
        columns = {name: part.grade(samples, row, deadline) for name, part in self._parts.items()}
        return [self._total({name: column[i] for name, column in columns.items()}) for i in range(len(samples))]

    def _total(self, scores: dict[str, Score]) -> Score:
        good: dict[str, float] = {}
        for name, score in scores.items():
            if isinstance(score, ScoringError):
                return score
            good[name] = score
        try:
            return total_of(self._config.grader, good)
        except ValueError as error:
            return GradingError("formula_parse_error", str(error))


def _open(part: Part, config: GraderScorer) -> OpenPart:
    if isinstance(part, StringCheckGrader):
        return StringCheck(part)
    if isinstance(part, TextSimilarityGrader):
        return TextSimilarity(part)
    if isinstance(part, PythonGrader):
        return PythonPart(part, config.time_limit_s)
    from penstock.services.reward.scorers.grader_model import ScoreModelPart  # its client takes long to import

    return ScoreModelPart(part, config)
