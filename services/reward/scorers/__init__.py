"""Scorers of the reward service.

To add one: a class in ``shared/config/rewards/scorers.py``, a module here, and a line in ``open_scorer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.services.reward.scorers.base import Closable, Described, GroupScorer, Scorer
from penstock.services.reward.scorers.code import Code
from penstock.services.reward.scorers.environment import Environment
from penstock.services.reward.scorers.exact import Exact
from penstock.services.reward.scorers.format import Format
from penstock.services.reward.scorers.function import Function
from penstock.services.reward.scorers.math import Math
from penstock.shared.config.rewards.scorers import (
    CodeScorer,
    EnvironmentScorer,
    ExactScorer,
    FormatScorer,
    FunctionScorer,
    GraderScorer,
    HttpScorer,
    JudgeScorer,
    MathScorer,
    RewardModelScorer,
    ScorerConfig,
)

__all__ = ["Closable", "Described", "GroupScorer", "Scorer", "open_scorer"]

_TYPES: dict[type, Callable[[Any], Scorer | GroupScorer]] = {
    EnvironmentScorer: Environment,
    ExactScorer: Exact,
    FormatScorer: Format,
    FunctionScorer: Function,
    MathScorer: Math,
    CodeScorer: Code,
}


def open_scorer(config: ScorerConfig) -> Scorer | GroupScorer:
    """Open the scorer that ``config`` describes. This may run user code and load a model: call it in a worker process.

    Raises:
        ScoringError: the scorer cannot be opened; the text says what to do.
    """
    if isinstance(config, JudgeScorer | HttpScorer | RewardModelScorer | GraderScorer):
        return _open_group_scorer(config)
    return _TYPES[type(config)](config)


def _open_group_scorer(config: JudgeScorer | HttpScorer | RewardModelScorer | GraderScorer) -> GroupScorer:
    """Open a group scorer. Only the module of its own type is imported, and only here, because importing the modules of
    all types would double the start time of processes."""
    if isinstance(config, RewardModelScorer):
        from penstock.services.reward.scorers.reward_model import RewardModel

        return RewardModel(config)
    if isinstance(config, GraderScorer):
        from penstock.services.reward.scorers.grader import OpenGrader

        return OpenGrader(config)
    from penstock.services.reward.scorers.http import Http
    from penstock.services.reward.scorers.judge import Judge

    return Judge(config) if isinstance(config, JudgeScorer) else Http(config)
