"""Verdict of the environment of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.shared.config.rewards.scorers import EnvironmentScorer
from penstock.shared.errors import ScoringError
from penstock.shared.protocol.messages import JUDGEMENTS

__all__ = ["Environment"]


class Environment:
    """Passes on what came with the completions."""

    def __init__(self, config: EnvironmentScorer) -> None:
        """Has no options of its own."""

    def score_group(
        self, prompt: str, completions: Sequence[str], answer: str | None, row: dict[str, Any]
    ) -> Sequence[float | ScoringError]:
        """One reward per completion. Raises ScoringError where none came with them."""
        rewards = row.get(JUDGEMENTS)
        if not isinstance(rewards, list) or len(rewards) != len(completions):
            raise ScoringError("no environment has judged these completions")
        return [float(reward) for reward in rewards]
