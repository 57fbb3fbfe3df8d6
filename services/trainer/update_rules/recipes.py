"""Recipes of the algorithms: advantages of a batch, and the loss of a token.

Each algorithm is a pair of functions; everything around them (epochs, KL, entropy, critic steps) is shared.

Shape legend: B = trajectories of the batch, B1 = B + 1, N = scored tokens of the batch, M = scored tokens of a
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.shared.algorithms.advantages import (
    grpo_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from penstock.shared.algorithms.cispo import cispo_loss
from penstock.shared.algorithms.credit import at_last_token
from penstock.shared.algorithms.gae import gae
from penstock.shared.algorithms.gspo import gspo_loss
from penstock.shared.algorithms.importance import masked_weights, sequence_log_ratio, truncated_weights
from penstock.shared.algorithms.policy_loss import (
    PolicyLoss,
    clipped_ratio_loss,
    dual_clipped_ratio_loss,
    log_ratio,
    weighted,
)
from penstock.shared.algorithms.returns import discounted_returns
from penstock.shared.algorithms.rewards import penalised_rewards
from penstock.shared.algorithms.statistics import moments, whiten
from penstock.shared.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    DAPOConfig,
    DistillationConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    REMAXConfig,
    RLOOConfig,
)
from penstock.shared.config.correction import IcepopConfig, ImportanceConfig, TISConfig

__all__ = ["Credit", "Experience", "Recipe", "Tokens", "recipe_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Inputs of the advantage computation for a whole batch, the same on every rank.

    Attributes:
        rewards_B: shaped rewards.
        groups_B: index of each trajectory's group.
        baselines_B: shaped reward of the group's greedy completion, or the tracked value that the batch was sealed
            with; NaN without one.
        lengths_B: number of scored tokens.
        cu_seqlens_B1: offsets that split N into trajectories.
        kl_N: KL of each token, subtracted from the reward with weight ``kl_coef``; None: nothing is subtracted.
        values_N: values of the critic; None without one.
        teacher_kl_N: ``log π - log π_teacher`` of each token (k1); None without a teacher.
    """

    rewards_B: Tensor
    groups_B: Tensor
    baselines_B: Tensor
    lengths_B: Tensor
    cu_seqlens_B1: Tensor
    kl_N: Tensor | None = None
    kl_coef: float = 0.0
    values_N: Tensor | None = None
    teacher_kl_N: Tensor | None = None

    @property
    def trajectory_rewards(self) -> Tensor:
        """Return the rewards of whole trajectories, [B], minus the KL penalty."""
        if self.kl_N is None:
            return self.rewards_B
        rows = torch.repeat_interleave(torch.arange(len(self.rewards_B)), self.lengths_B)
        kl_B = torch.zeros(len(self.rewards_B), dtype=torch.float64).index_add_(0, rows, self.kl_N.double())
        return self.rewards_B - self.kl_coef * kl_B

    @property
    def token_rewards(self) -> Tensor:
        """Return the reward at the last token of each trajectory, [N], minus the KL penalty at every token."""
        rewards_N = at_last_token(self.rewards_B, self.mask, self.cu_seqlens_B1)
        if self.kl_N is None:
            return rewards_N
        return penalised_rewards(rewards_N, self.kl_N, self.mask, coef=self.kl_coef)

    @property
    def mask(self) -> Tensor:
        """Return a mask of all True, [N], because the arrays over tokens hold scored tokens only."""
        return torch.ones(int(self.cu_seqlens_B1[-1]), dtype=torch.bool)

    @property
    def valid(self) -> Tensor:
        """Return a mask of all True, [B], because failed trajectories are not in the batch."""
        return torch.ones(len(self.rewards_B), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages, float32: [N] if ``per_token``, else [B], one for all tokens of a trajectory.

    ``returns_N`` is the critic's target; None without one.
    """

    advantages: Tensor
    per_token: bool = False
    returns_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Loss inputs of a microbatch.

    ``proximal_M``: log-probs in the denominator of the ratio; ``rows_M``: row of each token's trajectory.
    """

    logprobs_M: Tensor
    proximal_M: Tensor
    behaviour_M: Tensor
    advantages_M: Tensor
    rows_M: Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """Advantage function and loss function of one algorithm."""

    credit: Callable[[Experience], Credit]
    loss: Callable[[Tokens], PolicyLoss]


def recipe_of(algorithm: AlgorithmConfig) -> Recipe:
    """Return the functions of an algorithm, with its settings bound."""
    loss = _loss_of(algorithm)
    if algorithm.importance is not None:
        loss = partial(_corrected, loss=loss, importance=algorithm.importance)
    return Recipe(_credit_of(algorithm), loss)


def _credit_of(algorithm: AlgorithmConfig) -> Callable[[Experience], Credit]:  # noqa: PLR0911 - one for each kind
    match algorithm:
        case GRPOConfig() | DrGRPOConfig() | DAPOConfig() | GSPOConfig() | CISPOConfig():
            return partial(_grpo, scale_by_std=algorithm.scale_by_std)
        case RLOOConfig():
            return _rloo
        case REMAXConfig():
            return _remax
        case ReinforcePPBaselineConfig():
            return _reinforce_pp_baseline
        case ReinforcePPConfig():
            return partial(_reinforce_pp, gamma=algorithm.gamma, tracked=algorithm.baseline is not None)
        case PPOConfig():
            return partial(_ppo, gamma=algorithm.gamma, lam=algorithm.lam, normalise=algorithm.normalise_advantages)
        case DistillationConfig():
            return partial(_distillation, gamma=algorithm.gamma)


def _grpo(e: Experience, *, scale_by_std: bool) -> Credit:
    return Credit(grpo_advantages(e.trajectory_rewards, e.groups_B, e.valid, scale_by_std=scale_by_std))


def _rloo(e: Experience) -> Credit:
    return Credit(rloo_advantages(e.trajectory_rewards, e.groups_B, e.valid))


def _remax(e: Experience) -> Credit:
    return Credit(remax_advantages(e.trajectory_rewards, e.baselines_B, e.valid))


def _reinforce_pp_baseline(e: Experience) -> Credit:
    return Credit(reinforce_pp_baseline_advantages(e.trajectory_rewards, e.groups_B, e.valid, e.lengths_B))


def _reinforce_pp(e: Experience, *, gamma: float, tracked: bool) -> Credit:
    if tracked:  # baseline: the value before the batch, with which it was sealed
        e = replace(e, rewards_B=e.rewards_B - e.baselines_B)
    returns_N = discounted_returns(e.token_rewards, e.mask, e.cu_seqlens_B1, gamma=gamma)
    return Credit(whiten(returns_N, e.mask, moments(returns_N, e.mask)), per_token=True)


def _ppo(e: Experience, *, gamma: float, lam: float, normalise: bool) -> Credit:
    assert e.values_N is not None
    advantages_N, returns_N = gae(
        e.token_rewards, e.values_N, e.mask, e.cu_seqlens_B1, gamma=gamma, lam=lam,
        bootstrap_B=torch.zeros(len(e.rewards_B), dtype=torch.float32),
    )  # fmt: skip
    if normalise:
        advantages_N = whiten(advantages_N, e.mask, moments(advantages_N, e.mask))
    return Credit(advantages_N, per_token=True, returns_N=returns_N)


def _distillation(e: Experience, *, gamma: float) -> Credit:
    assert e.teacher_kl_N is not None
    return Credit(discounted_returns(-e.teacher_kl_N, e.mask, e.cu_seqlens_B1, gamma=gamma), per_token=True)


def _loss_of(algorithm: AlgorithmConfig) -> Callable[[Tokens], PolicyLoss]:
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm:
        case GSPOConfig():
            return partial(_gspo, clip_low=low, clip_high=high)
        case CISPOConfig():
            return partial(_cispo, clip_low=low, clip_high=high)
        case _ if algorithm.dual_clip is not None:
            return partial(_dual_clipped, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip)
        case _:
            return partial(_clipped, clip_low=low, clip_high=high)


def _clipped(t: Tokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    return clipped_ratio_loss(t.logprobs_M, t.proximal_M, t.advantages_M, clip_low=clip_low, clip_high=clip_high)


def _dual_clipped(t: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> PolicyLoss:
    return dual_clipped_ratio_loss(
        t.logprobs_M, t.proximal_M, t.advantages_M, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def _gspo(t: Tokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    return gspo_loss(t.logprobs_M, t.proximal_M, t.advantages_M, t.rows_M, clip_low=clip_low, clip_high=clip_high)


def _cispo(t: Tokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    return cispo_loss(t.logprobs_M, t.proximal_M, t.advantages_M, clip_low=clip_low, clip_high=clip_high)


def _corrected(t: Tokens, *, loss: Callable[[Tokens], PolicyLoss], importance: ImportanceConfig) -> PolicyLoss:
    """Return ``loss`` with each token weighted by the probability ratio of trainer to sampler.

    ``importance``: level of the ratio, token or sequence, and its truncation (TIS) or masking (IcePop).
    """
    if importance.level == "sequence":
        log_ratio_M = sequence_log_ratio(t.proximal_M, t.behaviour_M, t.rows_M)
    else:
        log_ratio_M = log_ratio(t.proximal_M, t.behaviour_M)
    match importance:
        case TISConfig():
            weights_M = truncated_weights(log_ratio_M, high=importance.high)
        case IcepopConfig():
            weights_M = masked_weights(log_ratio_M, low=importance.low, high=importance.high)
    return weighted(loss(t), weights_M)
