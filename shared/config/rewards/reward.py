"""Scoring of completions: a weighted sum of scorers."""

from __future__ import annotations

from collections import Counter

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.rewards.scorers import (
    GraderScorer,
    HttpScorer,
    JudgeScorer,
    RewardModelScorer,
    ScorerConfig,
)

__all__ = ["RewardConfig"]


class RewardConfig(StrictModel):
    """Scoring of completions."""

    scorers: list[ScorerConfig] = Field(min_length=1, max_length=8)
    """Scorers; the reward is the sum of weight * score."""
    timeout_s: float = Field(10.0, gt=0, le=3600)
    """Wall-clock limit of scoring one completion (seconds), from the start of scoring. If a scorer takes whole groups
    (`reward_model`, `judge`, `http`, `grader`), the limit applies to each group instead."""
    open_timeout_s: float = Field(60.0, gt=0, le=3600)
    """Wall-clock limit of starting a scorer process, with its imports and reward model (seconds)."""
    processes: int | None = Field(None, ge=1, le=256)
    """Scorer processes of this job in each reward service; null: one per core, at most four."""
    slow: bool = False
    """True: rollout workers publish unscored groups to the stream RAW, and the groups are scored from there. False:
    rollout workers wait for the scores of a group before they publish it."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> RewardConfig:
        twice = [name for name, count in Counter(s.name for s in self.scorers if s.name).items() if count > 1]
        if twice:
            raise ValueError(f"scorers: two components are named '{twice[0]}'")
        return self

    @model_validator(mode="after")
    def _limits_fit(self) -> RewardConfig:
        need_s = sum(scorer.budget_s for scorer in self.scorers)
        if need_s >= self.timeout_s:
            raise ValueError(
                f"timeout_s ({self.timeout_s:g}) must be larger than the limits of the scorers together ({need_s:g} s: "
                "time_limit_s and deadline_s), or a scorer is killed before it can answer"
            )
        return self

    @property
    def component_names(self) -> list[str]:
        """Name of each scorer: its `name`, or else its type, with a number appended if the name is already taken."""
        names: list[str] = []
        taken = {scorer.name for scorer in self.scorers}
        for scorer in self.scorers:
            name, number = scorer.name or scorer.type, 2
            while scorer.name is None and (name in names or name in taken):
                name, number = f"{scorer.type}_{number}", number + 1
            names.append(name)
        return names

    @property
    def whole_groups(self) -> bool:
        """True if a scorer scores all completions of a group in one call."""
        kinds = (RewardModelScorer, JudgeScorer, HttpScorer, GraderScorer)
        return any(isinstance(scorer, kinds) for scorer in self.scorers)
