"""Passes over the decisions of a batch with the clipped loss, shared by PPO and GRPO over episodes.

Every rank gets the whole batch and computes its share of each minibatch, so the number of ranks changes only rounding.

Shape legend: N = decisions of the batch, M = this rank's share of a minibatch, C = actions of a decision, A =
components of an action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.batch.episodes import EpisodeColumns
from penstock.services.trainer.batch.statistics import Mismatch
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.update_rules.networks import TrainedNetworks
from penstock.shared.algorithms.kl import kl_estimate
from penstock.shared.algorithms.policy_loss import PolicyLoss, clipped_ratio_loss
from penstock.shared.config.embodied import EpisodeGRPOConfig, EpisodePPOConfig
from penstock.shared.models.episode_policy import EpisodePolicy

__all__ = ["Decisions", "EpisodePasses", "decisions_of"]

OtherStep = Callable[[Tensor, int], None]
"""Callback ``(rows of this rank [M], number of decisions on all ranks)`` for a further step on a minibatch."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions of a batch as tensors, with observations by name."""

    observations: dict[str, Tensor]
    actions_NCA: Tensor
    behaviour_NCA: Tensor
    executed_NC: Tensor

    def __len__(self) -> int:
        return len(self.actions_NCA)

    def rows(self, own_M: Tensor) -> Decisions:
        """Return the decisions at the given rows."""
        observations = {name: column[own_M] for name, column in self.observations.items()}
        return Decisions(observations, self.actions_NCA[own_M], self.behaviour_NCA[own_M], self.executed_NC[own_M])

    def of_executed(self, numbers_NCA: Tensor) -> Tensor:
        """Sum ``numbers_NCA`` over the C actions of each decision and their A components; return [N]. Actions that were
        not executed are left out."""
        return torch.where(self.executed_NC[..., None], numbers_NCA, 0).sum((1, 2))

    def compare(self, logprobs_NCA: Tensor, mismatch: Mismatch) -> None:
        """Add to ``mismatch`` the difference between trainer and acting policy, per component of executed actions."""
        mismatch.add(logprobs_NCA[self.executed_NC].flatten(), self.behaviour_NCA[self.executed_NC].flatten())


def decisions_of(columns: EpisodeColumns, device: torch.device) -> Decisions:
    """Return the decisions of ``columns`` on ``device``."""
    arrays = columns.actions_NCA, columns.logprobs_NCA, columns.executed_NC
    observations = {name: torch.from_numpy(column).to(device) for name, column in columns.observations.items()}
    return Decisions(observations, *(torch.from_numpy(array).to(device) for array in arrays))


class EpisodePasses:
    """Makes ``epochs × minibatches`` policy steps. After each of them, the update rule can make a step of its own on
    the same minibatch, such as a step of a value network.

    The ratio is per decision: the log-prob of a decision is the sum over the components of its executed actions.

    Args:
        networks: contains the policy under the name ``policy``.
        seed: seed of the order in which decisions are trained.
    """

    def __init__(
        self,
        config: EpisodePPOConfig | EpisodeGRPOConfig,
        policy: EpisodePolicy,
        networks: TrainedNetworks,
        collective: Collective,
        *,
        seed: int,
    ) -> None:
        self._config, self._policy, self._networks = config, policy, networks
        self._collective, self._seed = collective, seed

    def run(
        self, batch: Decisions, advantages_N: Tensor, *, update_index: int, other: OtherStep | None = None
    ) -> dict[str, float]:
        """Make all steps of one update and return the policy's metrics, the same on every rank.

        No further pass begins once the KL of a pass exceeds ``max_kl``. Metrics are means over the last pass;
        ``mismatch/*`` covers the first minibatch, before any step.

        Raises:
            NonFiniteStep: a loss or a gradient is not finite, and the job is configured to pause then.
        """
        minibatches = min(self._config.minibatches, len(batch))
        mismatch, epochs, of_pass = Mismatch(), 0, dict[str, float]()
        self._networks.begin(update_index)
        while epochs < self._config.epochs:
            order = np.random.default_rng([self._seed, update_index, epochs]).permutation(len(batch))
            sums = _Sums(mismatch if not epochs else None)
            for part in np.array_split(order, minibatches):
                own_M = self._own(part)
                loss = self._loss(batch.rows(own_M), advantages_N[own_M], len(part), sums)
                self._networks.step("policy", loss)
                if other is not None:
                    other(own_M, len(part))
            of_pass = sums.means(self._collective)
            epochs += 1
            if self._config.max_kl is not None and of_pass["policy/approx_kl"] > self._config.max_kl:
                break
        return {**of_pass, **self._policy.facts(), **mismatch.means(self._collective), "policy/epochs": float(epochs)}

    def _own(self, part: NDArray[np.int64]) -> Tensor:
        device = next(self._policy.parameters()).device
        return torch.from_numpy(part[self._collective.rank :: self._collective.size]).to(device)

    def _loss(self, own: Decisions, advantages_M: Tensor, count: int, sums: _Sums) -> Tensor:
        """Return this rank's part of the mean loss over the decisions of the minibatch on all ranks."""
        found = self._policy.evaluate(own.observations, own.actions_NCA)
        logprobs_M, behaviour_M = own.of_executed(found.logprobs_NCA), own.of_executed(own.behaviour_NCA)
        loss = clipped_ratio_loss(
            logprobs_M, behaviour_M, advantages_M, clip_low=self._config.clip_low, clip_high=self._config.clip_high
        )
        if sums.mismatch is not None:
            own.compare(found.logprobs_NCA, sums.mismatch)
        sums.add(logprobs_M.detach(), behaviour_M, loss, found.entropy_N.detach())
        return (loss.loss_M - self._config.entropy_coef * found.entropy_N).sum() / count


class _Sums:
    """Sums over this rank's decisions in one pass. ``mismatch`` is None after the first minibatch."""

    def __init__(self, mismatch: Mismatch | None) -> None:
        self.mismatch = mismatch
        self._sums = dict.fromkeys(("approx_kl", "clip_low", "clip_high", "entropy", "count"), 0.0)
        self._ratio_max = 0.0

    def add(self, logprobs_M: Tensor, behaviour_M: Tensor, loss: PolicyLoss, entropy_M: Tensor) -> None:
        self.mismatch = None
        values = {
            "approx_kl": kl_estimate("k3", behaviour_M, logprobs_M), "entropy": entropy_M,
            "clip_low": loss.clipped_low_M, "clip_high": loss.clipped_high_M,
        }  # fmt: skip
        for name, values_M in values.items():
            self._sums[name] += float(values_M.double().sum())
        self._sums["count"] += len(logprobs_M)
        if len(logprobs_M):
            self._ratio_max = max(self._ratio_max, float(loss.ratio_M.max()))

    def means(self, collective: Collective) -> dict[str, float]:
        total = collective.sum(self._sums)
        count = total.pop("count")
        return {
            **{f"policy/{name}": value / count for name, value in total.items()},
            "policy/ratio_max": collective.max({"ratio": self._ratio_max})["ratio"],
        }
