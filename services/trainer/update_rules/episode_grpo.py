"""GRPO over episodes that begin in the same state: no value network, one advantage for all decisions of an episode.

An update is a pure function of the state, the columns of the batch and its number.

Shape legend: N = decisions of the batch, E = its episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.batch.episodes import EpisodeColumns
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.update_rules.episode_passes import EpisodePasses, decisions_of
from penstock.services.trainer.update_rules.networks import TrainedNetworks
from penstock.shared.algorithms.advantages import grpo_advantages
from penstock.shared.config.embodied import EpisodeGRPOConfig
from penstock.shared.models.episode_policy import EpisodePolicy

__all__ = ["EpisodeGRPORule"]


class EpisodeGRPORule:
    """Computes advantages from the returns of each group, then makes ``epochs × minibatches`` policy steps.

    The loss is the mean over all decisions, including those of episodes whose advantage is 0.

    Args:
        seed: seed of the order in which decisions are trained.
        collective, total_updates, on_nonfinite: see ``EpisodePPORule``.

    Raises:
        ConfigError: an optimizer is not installed.
    """

    def __init__(
        self,
        config: EpisodeGRPOConfig,
        policy: EpisodePolicy,
        *,
        seed: int,
        collective: Collective,
        total_updates: int | None = None,
        on_nonfinite: Literal["pause", "skip"] = "pause",
    ) -> None:
        self._config, self._policy, self._device = config, policy, next(policy.parameters()).device
        self._networks = TrainedNetworks(
            {"policy": (policy, config.policy)}, collective, total_updates=total_updates, on_nonfinite=on_nonfinite
        )
        self._passes = EpisodePasses(config, policy, self._networks, collective, seed=seed)

    def update(self, columns: EpisodeColumns, *, update_index: int) -> dict[str, float]:
        """Make one policy update; see ``EpisodePPORule.update``."""
        advantages_E = grpo_advantages(
            torch.from_numpy(columns.returns_E),
            torch.from_numpy(columns.group_E),
            torch.ones(len(columns.group_E), dtype=torch.bool),
            scale_by_std=self._config.scale_by_std,
        )
        advantages_N = torch.repeat_interleave(advantages_E, torch.from_numpy(columns.lengths)).to(self._device)
        report = self._passes.run(decisions_of(columns, self._device), advantages_N, update_index=update_index)
        signal = np.unique(columns.group_E[(advantages_E != 0).numpy()])
        return {
            **self._networks.report(),
            **report,
            "groups/no_signal": float(len(columns.draws) - len(signal)),
        }

    def state(self) -> dict[str, Tensor]:
        """Return copies of everything except the policy's weights, by name, on the CPU."""
        return self._networks.state(without="policy")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned. Raises CheckpointError, before any change, if the networks differ."""
        self._networks.load_state(state, without="policy", what="GRPO")
