"""Scorers. Adding one: a config class in ``shared/config/reward.py``, one file here, one line in ``open_scorer``."""

from __future__ import annotations

from penstock.services.reward.scorers.base import Scorer
from penstock.services.reward.scorers.exact import Exact
from penstock.services.reward.scorers.format import Format
from penstock.services.reward.scorers.function import Function
from penstock.services.reward.scorers.math import Math
from penstock.shared.config.reward import ExactScorer, FormatScorer, FunctionScorer, ScorerConfig

__all__ = ["Scorer", "open_scorer"]


def open_scorer(config: ScorerConfig) -> Scorer:
    """The scorer of a configuration. Runs code of the user for `function`: call it in a worker process.

    Raises:
        ScoringError: the scorer cannot be opened, with what to do.
    """
    if isinstance(config, ExactScorer):
        return Exact(config)
    if isinstance(config, FormatScorer):
        return Format(config)
    if isinstance(config, FunctionScorer):
        return Function(config)
    return Math(config)
