"""Scorers: a weighted sum of verifiable rewards. Each runs in a killable process."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.shared.config.base import StrictModel

__all__ = ["ExactScorer", "FormatScorer", "FunctionScorer", "MathScorer", "RewardConfig", "ScorerConfig"]


class _Scorer(StrictModel):
    weight: float = 1.0
    """Factor in the sum."""
    name: str | None = None
    """Name of this component in metrics; default: its type."""


class ExactScorer(_Scorer):
    """1 if the stripped completion equals the reference answer, else 0."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without regard to case."""


class MathScorer(_Scorer):
    """1 if the final answer is mathematically equal to the reference (library math-verify), else 0."""

    type: Literal["math"] = "math"


class FormatScorer(_Scorer):
    """1 if the whole completion matches a regular expression, else 0."""

    type: Literal["format"] = "format"
    pattern: str
    """Python regular expression; `.` matches newlines."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value, re.DOTALL)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value


class FunctionScorer(_Scorer):
    """A Python function of the user: ``score(prompt, completion, answer, row, **args) -> float``."""

    type: Literal["function"] = "function"
    path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, importable by the reward service."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed on each call."""


ScorerConfig = Annotated[ExactScorer | MathScorer | FormatScorer | FunctionScorer, Field(discriminator="type")]


class RewardConfig(StrictModel):
    """How completions are scored."""

    scorers: list[ScorerConfig] = Field(min_length=1)
    """The reward is the sum of weight * score over these."""
    timeout_s: float = Field(10.0, gt=0, le=3600)
    """Wall-clock limit of scoring one completion, counted from the start of scoring."""
    slow: bool = False
    """Score from the RAW stream after generation, not before the group is published."""
