"""Scorer that returns the reward of an episode's environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.shared.config.rewards.scorers import EnvironmentScorer
from penstock.shared.errors import ScoringError
from penstock.shared.protocol.messages import JUDGEMENTS

__all__ = ["Environment"]


class Environment:
    """Returns the rewards that were sent with the completions."""

    def __init__(self, config: EnvironmentScorer) -> None:
        """Accept the config, which has no options."""

    def score_group(
        self, prompt: str, completions: Sequence[str], answer: str | None, row: dict[str, Any]
    ) -> Sequence[float | ScoringError]:
        """Return one reward per completion. Raises ScoringError if none were sent."""
        rewards = row.get(JUDGEMENTS)
        if not isinstance(rewards, list) or len(rewards) != len(completions):
            raise ScoringError("no environment has judged these completions")
        return [float(reward) for reward in rewards]
