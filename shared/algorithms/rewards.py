"""Transformation of rewards before advantages are computed: normalise, scale, clip, subtract the KL of each token.

Shape legend: B = trajectories, T = tokens of all trajectories.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.shared.algorithms.statistics import VARIANCE_EPSILON, Moments

__all__ = ["normalise_rewards", "penalised_rewards", "scale_and_clip"]


def normalise_rewards(rewards_B: Tensor, seen: Moments) -> Tensor:
    """``(r - mean) / sqrt(variance + 1e-8)`` with mean and variance of all rewards of the run so far, float32 [B].

    Args:
        seen: moments of all rewards of the run, ``rewards_B`` included; the caller accumulates them.
    """
    return ((rewards_B.double() - seen.mean) / math.sqrt(seen.variance + VARIANCE_EPSILON)).float()


def scale_and_clip(rewards_B: Tensor, *, scale: float, clip: tuple[float, float] | None) -> Tensor:
    """``clip(scale · r, low, high)``, [B]; without clipping if ``clip`` is None."""
    scaled_B = rewards_B * scale
    return scaled_B if clip is None else scaled_B.clamp(*clip)


def penalised_rewards(rewards_T: Tensor, kl_T: Tensor, mask_T: Tensor, *, coef: float) -> Tensor:
    """``r_t - coef · KL_t`` at scored tokens, 0 elsewhere, without gradient (InstructGPT, arXiv 2203.02155, eq. 2)."""
    return torch.where(mask_T.bool(), rewards_T - coef * kl_T.detach(), 0)
