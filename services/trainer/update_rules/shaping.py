"""Shaping of rewards before advantages, and the running statistics that it needs.

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
    """Rewards of a batch as advantages see them, and the statistics of the run with this batch counted."""

    rewards_B: Tensor
    baselines_B: Tensor
    moments: Moments


class RewardShaper:
    """Normalise, scale, clip, then add the punishment of long completions; greedy baselines are not punished.

    Normalisation uses all rewards of the run, this batch included, so that the first batch is normalised too.
    """

    def __init__(self, algorithm: AlgorithmConfig, max_new_tokens: int) -> None:
        self._config = algorithm.shaping
        self._punishment = algorithm.overlong_punishment
        self._max_new_tokens = max_new_tokens
        self._moments = Moments(0.0, 0.0, 0.0)

    def shape(self, facts: BatchFacts) -> Shaped:
        """Shaped rewards; the running statistics are taken over only by ``keep``."""
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
        """The batch was trained: its rewards count from now on."""
        if self._config.normalise:
            self._moments = shaped.moments

    def state(self) -> dict[str, Tensor]:
        """Count, sum and sum of squares of all rewards."""
        if not self._config.normalise:
            return {}
        return {"rewards": torch.tensor(astuple(self._moments), dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state``."""
        if self._config.normalise:
            self._moments = Moments(*state["rewards"].tolist())

    def _shape(self, rewards_B: Tensor, total: Moments) -> Tensor:
        if self._config.normalise:
            rewards_B = normalise_rewards(rewards_B, total)
        return scale_and_clip(rewards_B, scale=self._config.scale, clip=self._config.clip)
