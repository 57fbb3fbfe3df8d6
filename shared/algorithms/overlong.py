"""Overlong completions: exclusion from the loss, and a penalty on the reward (DAPO, arXiv 2503.14476, §3.4).

Shape legend: B = trajectories.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["overlong_filter", "soft_overlong_punishment"]


def overlong_filter(truncated_B: Tensor) -> Tensor:
    """Return a mask, bool [B]: True for trajectories that are not truncated. Only these count in the loss and its
    denominators.

    The reward of a truncated completion does not show how good the complete one would have been. Group statistics
    still count this reward.
    """
    return ~truncated_B.bool()


def soft_overlong_punishment(lengths_B: Tensor, *, max_length: float, buffer: float) -> Tensor:
    """Return the punishment to add to the reward (eq. 13), float32 [B] in [-1, 0].

    It is 0 up to ``max_length - buffer``, then falls linearly to -1 at ``max_length``, and is -1 beyond.

    Args:
        lengths_B: generated tokens of each trajectory.
        max_length, buffer: in tokens; ``0 < buffer <= max_length``.
    """
    return ((max_length - buffer - lengths_B.double()) / buffer).clamp(-1, 0).float()
