"""Soft actor-critic with twin critics, target critics and automatic temperature (arXiv 1812.05905).

Losses are per transition; the caller takes the mean over the whole batch.

Shape legend: B = transitions, C = critics.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["sac_actor_loss", "sac_critic_loss", "sac_targets", "sac_temperature_loss", "soft_update"]


def sac_targets(
    rewards_B: Tensor,
    terminated_B: Tensor,
    next_target_values_CB: Tensor,
    next_logprobs_B: Tensor,
    *,
    gamma: float,
    alpha: Tensor,
) -> Tensor:
    """``y = r + gamma · (1 - terminated) · (min_c Q_target(s', a') - alpha · log pi(a'|s'))``, [B], without gradient.

    Args:
        terminated_B: bool, True if the next state ends the task. A truncated transition is not terminated: its
            future value counts.
        next_target_values_CB: values by the target critics at an action newly sampled from the policy in the next
            state.
        next_logprobs_B: log-prob of that action.
        gamma: discount of one transition.
        alpha: temperature.
    """
    soft_B = next_target_values_CB.amin(0) - alpha * next_logprobs_B
    return (rewards_B + gamma * torch.where(terminated_B, 0, soft_B)).detach()


def sac_critic_loss(values_CB: Tensor, targets_B: Tensor) -> Tensor:
    """``Σ_c (Q_c - y)² / 2``, [B] (eq. 5)."""
    return ((values_CB - targets_B).square() / 2).sum(0)


def sac_actor_loss(logprobs_B: Tensor, values_CB: Tensor, *, alpha: Tensor) -> Tensor:
    """``alpha · log pi(a|s) - min_c Q_c(s, a)`` for a reparametrised action a, [B] (eq. 7).

    No gradient reaches the temperature. Freeze the critics, or discard their gradients.
    """
    return alpha.detach() * logprobs_B - values_CB.amin(0)


def sac_temperature_loss(log_alpha: Tensor, logprobs_B: Tensor, *, target_entropy: float) -> Tensor:
    """``-alpha · (log pi + target_entropy)``, [B] (eq. 18): alpha grows while the entropy is below its target.

    Args:
        log_alpha: scalar parameter; alpha = exp(log_alpha) > 0.
        target_entropy: nats; the paper takes minus the number of action dimensions.
    """
    return -log_alpha.exp() * (logprobs_B.detach() + target_entropy)


@torch.no_grad()
def soft_update(targets: Iterable[Tensor], sources: Iterable[Tensor], *, tau: float) -> None:
    """``target ← target + tau · (source - target)`` in place, tensor by tensor."""
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, tau)
