"""Logits at a temperature.

Shape legend: M = positions, V = vocabulary, or a part of it.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["tempered"]


def tempered(logits_MV: Tensor, temperature: float | Tensor) -> Tensor:
    """Return ``logits / temperature`` in float32.

    Args:
        temperature: one number for all positions, where 0 is greedy and leaves the logits unchanged; or [M], a number
            above 0 for each position.
    """
    logits_MV = logits_MV.float()
    if isinstance(temperature, Tensor):
        return logits_MV / temperature[:, None]
    return logits_MV if temperature in (0.0, 1.0) else logits_MV / temperature
