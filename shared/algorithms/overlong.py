"""Completions that are too long (DAPO, arXiv 2503.14476, §3.4).

Shape legend: B = trajectories.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["overlong_filter", "soft_overlong_punishment"]


def overlong_filter(truncated_B: Tensor) -> Tensor:
    """Which trajectories the loss and its denominators count, bool [B]: those that were not cut off.

    A truncated completion has a reward that says nothing about its end. Group statistics still count it.
    """
    return ~truncated_B.bool()


def soft_overlong_punishment(lengths_B: Tensor, *, max_length: float, buffer: float) -> Tensor:
    """Added to the reward (eq. 13), float32 [B] in [-1, 0].

    0 up to ``max_length - buffer``, then falling linearly to -1 at ``max_length``, -1 beyond.

    Args:
        lengths_B: generated tokens of each trajectory.
        max_length, buffer: in tokens; ``0 < buffer <= max_length``.
    """
    return ((max_length - buffer - lengths_B.double()) / buffer).clamp(-1, 0).float()
