"""PPO over episodes: any policy, a value network, GAE and the clipped loss.

An update is a pure function of the state, the columns of the batch and its number. Every rank computes the advantages
of the whole batch.

Shape legend: N = decisions of the batch, E = its episodes, M = this rank's share of a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from penstock.services.trainer.batch.episodes import EpisodeColumns
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.update_rules.critic import value_facts
from penstock.services.trainer.update_rules.episode_passes import EpisodePasses, decisions_of
from penstock.services.trainer.update_rules.networks import TrainedNetworks
from penstock.shared.algorithms.gae import gae
from penstock.shared.algorithms.statistics import moments, whiten
from penstock.shared.algorithms.value_loss import clipped_value_loss, squared_error, value_loss
from penstock.shared.config.embodied import EpisodePPOConfig
from penstock.shared.models.building import building
from penstock.shared.models.control import ValueNetwork
from penstock.shared.models.episode_policy import EpisodePolicy
from penstock.shared.models.observations import Seen

__all__ = ["EpisodePPORule"]


@dataclass(frozen=True, slots=True)
class _Targets:
    """Values before the update, advantages and returns, [N] each, and observations encoded for the value network."""

    seen: Seen
    values_N: Tensor
    advantages_N: Tensor
    returns_N: Tensor


class EpisodePPORule:
    """Computes advantages over the whole batch, then makes ``epochs × minibatches`` steps of policy and value network.

    Args:
        seed: seed of the value network's initial weights and of the order in which decisions are trained.
        collective: ranks that share a batch; all of them get the same columns.
        total_updates: length of the run for the learning-rate schedules.
        on_nonfinite: ``pause``: a loss or gradient that is not finite ends the update with an error; ``skip``: the step
            is left out.

    Raises:
        ConfigError: an optimizer is not installed.
    """

    def __init__(
        self,
        config: EpisodePPOConfig,
        policy: EpisodePolicy,
        *,
        seed: int,
        collective: Collective,
        total_updates: int | None = None,
        on_nonfinite: Literal["pause", "skip"] = "pause",
    ) -> None:
        self._config, self._policy, self._device = config, policy, next(policy.parameters()).device
        with building(seed):
            self._value = ValueNetwork(policy.encoder.another(), config.value_hidden_sizes).to(self._device)
        self._networks = TrainedNetworks(
            {"policy": (policy, config.policy), "value": (self._value, config.value)},
            collective,
            total_updates=total_updates,
            on_nonfinite=on_nonfinite,
        )
        self._passes = EpisodePasses(config, policy, self._networks, collective, seed=seed)

    def update(self, columns: EpisodeColumns, *, update_index: int) -> dict[str, float]:
        """Make one policy update and return its metrics, the same on every rank.

        Args:
            update_index: number of the update in the run, from 0; seeds the order of the decisions.

        Raises:
            NonFiniteStep: a loss or a gradient is not finite and ``on_nonfinite`` is ``pause``.
        """
        targets = self._targets(columns)
        report = self._passes.run(
            decisions_of(columns, self._device), targets.advantages_N, update_index=update_index,
            other=partial(self._value_step, targets),
        )  # fmt: skip
        return {
            **self._networks.report(),
            **value_facts(targets.values_N.cpu(), targets.returns_N.cpu()),
            **report,
        }

    def state(self) -> dict[str, Tensor]:
        """Return copies of everything except the policy's weights, by name, on the CPU."""
        return self._networks.state(without="policy")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned. Raises CheckpointError, before any change, if the networks differ."""
        self._networks.load_state(state, without="policy", what="PPO")

    @torch.no_grad()
    def _targets(self, columns: EpisodeColumns) -> _Targets:
        """Compute the targets of the whole batch; every rank computes all targets."""
        device = self._device
        observations, last = (
            {name: torch.from_numpy(column).to(device) for name, column in named.items()}
            for named in (columns.observations, columns.final_observations)
        )
        seen = self._policy.read(observations)
        values_N, bootstrap_E = self._value(seen), self._value(self._policy.read(last))
        every_N = torch.ones(len(columns), dtype=torch.bool, device=device)
        advantages_N, returns_N = gae(
            torch.from_numpy(columns.rewards_N).to(device),
            values_N,
            every_N,
            torch.from_numpy(columns.cu_seqlens_E1).to(device),
            gamma=self._config.gamma,
            lam=self._config.lam,
            bootstrap_B=torch.where(torch.from_numpy(columns.terminated_E).to(device), 0, bootstrap_E),
        )
        if self._config.normalise_advantages:
            advantages_N = whiten(advantages_N, every_N, moments(advantages_N, every_N))
        return _Targets(seen, values_N, advantages_N, returns_N)

    def _value_step(self, targets: _Targets, own_M: Tensor, count: int) -> None:
        values_M, returns_M = self._value(targets.seen.rows(own_M)), targets.returns_N[own_M]
        if self._config.value_clip is None:
            loss_M = value_loss(values_M, returns_M, error=squared_error)
        else:
            old_M, clip = targets.values_N[own_M], self._config.value_clip
            loss_M = clipped_value_loss(values_M, old_M, returns_M, clip=clip, error=squared_error)
        self._networks.step("value", loss_M.sum() / count)
