"""PPO for a diagonal Gaussian policy with a value network over vectors of transitions.

An update is a pure function of the state, the rollout and its number. Every rank gets the whole rollout and computes
its share of each minibatch; advantages are those of the whole batch, so the number of ranks changes nothing but
rounding.

Shape legend: N = transitions of the rollout, S = its segments, M = this rank's share of a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.collective import Collective
from penstock.services.trainer.optimizer import copy_into
from penstock.services.trainer.transitions import Rollout
from penstock.services.trainer.update_rules.critic import value_facts
from penstock.services.trainer.update_rules.networks import TrainedNetworks
from penstock.shared.algorithms.gae import gae
from penstock.shared.algorithms.gaussian import gaussian_entropy, gaussian_logprobs
from penstock.shared.algorithms.kl import kl_estimate
from penstock.shared.algorithms.policy_loss import clipped_ratio_loss
from penstock.shared.algorithms.statistics import moments, whiten
from penstock.shared.algorithms.value_loss import clipped_value_loss, squared_error, value_loss
from penstock.shared.config.embodied import EpisodePPOConfig, PolicyConfig
from penstock.shared.errors import ProtocolError
from penstock.shared.models.control import GaussianPolicy, ValueNetwork

__all__ = ["GaussianPPORule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The rollout as tensors, with what is learnt from it: values before the update, advantages and returns, [N]."""

    observations_NO: Tensor
    actions_NA: Tensor
    logprobs_N: Tensor
    values_N: Tensor
    advantages_N: Tensor
    returns_N: Tensor


class GaussianPPORule:
    """Advantages over the whole rollout, then ``epochs × minibatches`` steps of policy and value network.

    Args:
        policy: shape of the policy network.
        observation_size, action_size: of the vectors that the environment gives and takes.
        seed: of the first weights and of the order in which transitions are trained.
        collective: the ranks that share a batch; all of them are given the same rollout.
        total_updates: length of the run for the learning-rate schedules.
        on_nonfinite: a loss or gradient that is not finite ends the update with an error, or leaves out that step.

    Raises:
        ConfigError: an optimizer is not installed.
    """

    def __init__(
        self,
        config: EpisodePPOConfig,
        policy: PolicyConfig,
        *,
        observation_size: int,
        action_size: int,
        seed: int,
        collective: Collective,
        total_updates: int | None = None,
        on_nonfinite: Literal["pause", "skip"] = "pause",
        device: torch.device | str = "cpu",
    ) -> None:
        self._config, self._seed, self._collective, self._device = config, seed, collective, torch.device(device)
        self._sizes = observation_size, action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = GaussianPolicy(
                observation_size, action_size, policy.hidden_sizes, initial_log_std=policy.initial_log_std
            ).to(self._device)
            self._value = ValueNetwork(observation_size, config.value_hidden_sizes).to(self._device)
        self._networks = TrainedNetworks(
            {"policy": (self.policy, config.policy), "value": (self._value, config.value)},
            collective,
            total_updates=total_updates,
            on_nonfinite=on_nonfinite,
        )

    def update(self, rollout: Rollout, *, update_index: int) -> dict[str, float]:
        """One policy update; returns its metrics, the same on every rank.

        Args:
            update_index: number of the update in the run, from 0; decides the order of the transitions.

        Raises:
            ProtocolError: vectors of other sizes, or fewer transitions than minibatches; nothing was changed.
            NonFiniteStep: a loss or a gradient is not finite and ``on_nonfinite`` is ``pause``.
        """
        self._check(rollout)
        batch = self._prepare(rollout)
        self._networks.begin(update_index)
        epochs, of_epoch = 0, dict[str, float]()
        while epochs < self._config.epochs:
            order = np.random.default_rng([self._seed, update_index, epochs]).permutation(len(rollout))
            of_epoch = self._epoch(batch, np.array_split(order, self._config.minibatches))
            epochs += 1
            if self._config.max_kl is not None and of_epoch["policy/approx_kl"] > self._config.max_kl:
                break
        log_std_A = self.policy.log_std_A.detach()
        return {
            **self._networks.report(),
            **value_facts(batch.values_N.cpu(), batch.returns_N.cpu()),
            **of_epoch,
            "policy/epochs": float(epochs),
            "policy/entropy": float(gaussian_entropy(log_std_A)),
            "policy/std": float(log_std_A.exp().mean()),
            "reward/mean": float(rollout.rewards_N.mean(dtype=np.float64)),
        }

    def state(self) -> dict[str, Tensor]:
        """Copies of weights and optimizer states, by name, on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._networks.tensors().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: of other networks; nothing was loaded.
        """
        copy_into(self._networks.tensors(), state, what="PPO")

    # -- before the first step ---------------------------------------------------------------------------------------

    def _check(self, rollout: Rollout) -> None:
        sizes = rollout.observations_NO.shape[1:], rollout.actions_NA.shape[1:]
        if sizes != ((self._sizes[0],), (self._sizes[1],)) or rollout.last_observations_SO.shape[1:] != sizes[0]:
            raise ProtocolError(
                f"observations and actions have the shapes {list(sizes[0])} and {list(sizes[1])}; "
                f"the policy takes [{self._sizes[0]}] and gives [{self._sizes[1]}]"
            )
        if len(rollout) < self._config.minibatches:
            raise ProtocolError(
                f"{len(rollout)} transitions cannot be cut into {self._config.minibatches} minibatches: collect more"
            )

    @torch.no_grad()
    def _prepare(self, rollout: Rollout) -> _Batch:
        """Tensors that all steps of an update share; on every rank from the whole rollout."""
        observations_NO = self._tensor(rollout.observations_NO)
        values_N = self._value(observations_NO)
        bootstrap_S = self._value(self._tensor(rollout.last_observations_SO))
        every_N = torch.ones(len(rollout), dtype=torch.bool, device=self._device)
        advantages_N, returns_N = gae(
            self._tensor(rollout.rewards_N),
            values_N,
            every_N,
            torch.from_numpy(rollout.cu_seqlens_S1).to(self._device),
            gamma=self._config.gamma,
            lam=self._config.lam,
            bootstrap_B=torch.where(torch.from_numpy(rollout.terminated_S).to(self._device), 0, bootstrap_S),
        )
        if self._config.normalise_advantages:
            advantages_N = whiten(advantages_N, every_N, moments(advantages_N, every_N))
        return _Batch(
            observations_NO=observations_NO,
            actions_NA=self._tensor(rollout.actions_NA),
            logprobs_N=self._tensor(rollout.logprobs_N),
            values_N=values_N,
            advantages_N=advantages_N,
            returns_N=returns_N,
        )

    def _tensor(self, column: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(column).to(self._device, torch.float32)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _epoch(self, batch: _Batch, parts: list[NDArray[np.int64]]) -> dict[str, float]:
        """One pass; returns its means over all transitions of all ranks."""
        sums = {"policy/approx_kl": 0.0, "policy/clip_low": 0.0, "policy/clip_high": 0.0}
        for part in parts:
            own_M = torch.from_numpy(part[self._collective.rank :: self._collective.size]).to(self._device)
            self._networks.step("policy", self._policy_loss(batch, own_M, len(part), sums))
            self._networks.step("value", self._value_loss(batch, own_M, len(part)))
        return {name: total / len(batch.returns_N) for name, total in self._collective.sum(sums).items()}

    def _policy_loss(self, batch: _Batch, own_M: Tensor, count: int, sums: dict[str, float]) -> Tensor:
        mean_MA, log_std_MA = self.policy(batch.observations_NO[own_M])
        logprobs_M = gaussian_logprobs(batch.actions_NA[own_M], mean_MA, log_std_MA)
        behaviour_M = batch.logprobs_N[own_M]
        loss = clipped_ratio_loss(
            logprobs_M,
            behaviour_M,
            batch.advantages_N[own_M],
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
        )
        sums["policy/approx_kl"] += float(kl_estimate("k3", behaviour_M, logprobs_M.detach()).double().sum())
        sums["policy/clip_low"] += float(loss.clipped_low_M.sum())
        sums["policy/clip_high"] += float(loss.clipped_high_M.sum())
        return (loss.loss_M - self._config.entropy_coef * gaussian_entropy(log_std_MA)).sum() / count

    def _value_loss(self, batch: _Batch, own_M: Tensor, count: int) -> Tensor:
        values_M, returns_M = self._value(batch.observations_NO[own_M]), batch.returns_N[own_M]
        if self._config.value_clip is None:
            return value_loss(values_M, returns_M, error=squared_error).sum() / count
        old_M = batch.values_N[own_M]
        clip = self._config.value_clip
        return clipped_value_loss(values_M, old_M, returns_M, clip=clip, error=squared_error).sum() / count
