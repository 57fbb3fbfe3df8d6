"""Shaping of rewards before the advantage computation, with its running statistics.

Shape legend: B = trajectories of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from penstock.services.trainer.batch.facts import BatchFacts
from penstock.shared.algorithms.overlong import soft_overlong_punishment
from penstock.shared.algorithms.rewards import normalise_rewards, scale_and_clip
from penstock.shared.algorithms.statistics import Moments, moments
from penstock.shared.config.algorithm import AlgorithmConfig

__all__ = ["RewardShaper", "Shaped"]


@dataclass(frozen=True, slots=True)
class Shaped:
    """Shaped rewards and baselines of a batch, and the statistics of the run including this batch."""

    rewards_B: Tensor
    baselines_B: Tensor
    moments: Moments


class RewardShaper:
    """Normalises, scales and clips rewards and greedy baselines. Then adds the penalty for long completions to the
    rewards, but not to the baselines.

    Normalisation uses all rewards of the run including this batch, so that the first batch is normalised too.
    """

    def __init__(self, algorithm: AlgorithmConfig, max_new_tokens: int) -> None:
        self._config = algorithm.shaping
        self._punishment = algorithm.overlong_punishment
        self._max_new_tokens = max_new_tokens
        self._moments = Moments(0.0, 0.0, 0.0)

    def shape(self, facts: BatchFacts) -> Shaped:
        """Return shaped rewards and baselines. The running statistics change only in ``keep``."""
        rewards_B = torch.from_numpy(facts.rewards_B)
        total = self._moments + moments(rewards_B, torch.ones(len(rewards_B), dtype=torch.bool))
        shaped_B = self._shape(rewards_B, total)
        if self._punishment is not None:
            lengths_B = torch.from_numpy(facts.scored_B)
            buffer = self._punishment.buffer * self._max_new_tokens
            punished_B = soft_overlong_punishment(lengths_B, max_length=self._max_new_tokens, buffer=buffer)
            shaped_B = shaped_B + self._punishment.coef * punished_B
        baselines_B = self._shape(torch.from_numpy(facts.baseline_G[facts.group_B]), total)
        return Shaped(shaped_B, baselines_B, total)

    def keep(self, shaped: Shaped) -> None:
        """Add the rewards of a trained batch to the running statistics."""
        if self._config.normalise:
            self._moments = shaped.moments

    def state(self) -> dict[str, Tensor]:
        """Return count, sum and sum of squares of all rewards; empty without normalisation."""
        if not self._config.normalise:
            return {}
        return {"rewards": torch.tensor(astuple(self._moments), dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        if self._config.normalise:
            self._moments = Moments(*state["rewards"].tolist())

    def _shape(self, rewards_B: Tensor, total: Moments) -> Tensor:
        if self._config.normalise:
            rewards_B = normalise_rewards(rewards_B, total)
        return scale_and_clip(rewards_B, scale=self._config.scale, clip=self._config.clip)
