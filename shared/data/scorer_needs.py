"""Fields that a job's scorers need in each row, checked before the job runs."""

from __future__ import annotations

from typing import Any

from penstock.shared.config.rewards.graders import fields_of
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rewards.scorers import (
    CodeScorer,
    ExactScorer,
    GraderScorer,
    JudgeScorer,
    MathScorer,
    RewardModelScorer,
)
from penstock.shared.data.code_tests import parse_tests
from penstock.shared.data.prompts import check_messages
from penstock.shared.data.template import Template, missing_field
from penstock.shared.errors import DataError

__all__ = ["ScorerNeeds"]

_GIVEN = {"prompt", "completion", "answer"}
"""Fields of a judge's template that are not taken from the row."""


class ScorerNeeds:
    """Callable ``(row, place)`` that checks that a row has all fields that the scorers need; ``place`` names the row in
    errors."""

    def __init__(self, config: RewardConfig, *, has_answer: bool) -> None:
        """Collect the fields that the scorers read. ``has_answer``: rows have a reference answer.

        Raises:
            DataError: a scorer needs an answer that no row has, or a judge's template is broken.
        """
        self._config = config
        self._fields: list[tuple[str, str]] = []
        for name, scorer in zip(config.component_names, config.scorers, strict=True):
            needs_answer = isinstance(scorer, ExactScorer | MathScorer)
            if isinstance(scorer, JudgeScorer):
                template = Template(scorer.template, f"the template of scorer '{name}'")
                needs_answer = "answer" in template.fields
                where = f"the template of scorer '{name}'"
                self._fields += [(field, where) for field in template.fields if field not in _GIVEN]
            if isinstance(scorer, GraderScorer):
                fields, where = sorted(fields_of(scorer.grader)), f"the grader of scorer '{name}'"
                self._fields += [(field, where) for field in fields]
            if needs_answer and not has_answer:
                raise DataError(f"scorer '{name}' needs a reference answer: set data.prompt.answer")

    def __call__(self, row: dict[str, Any], place: str) -> None:
        """Check that ``row`` has the fields that the scorers need.

        Raises:
            DataError: a field is missing or invalid; the text names the field and ``place``.
        """
        for field, where in self._fields:
            if field not in row:
                raise DataError(missing_field(place, field, row, where))
        for scorer in self._config.scorers:
            if isinstance(scorer, CodeScorer):
                parse_tests(row, scorer.tests, place)
            elif isinstance(scorer, RewardModelScorer) and scorer.messages is not None:
                check_messages(row, scorer.messages, place)
