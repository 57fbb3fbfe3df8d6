"""The weight of the KL to the reference, fixed or steered to a target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.shared.algorithms.kl_control import adapt_kl_coef
from penstock.shared.config.correction import KLConfig

__all__ = ["KLCoefficient"]


class KLCoefficient:
    """Weight of the KL term; with ``adaptive`` it changes after each update (arXiv 1909.08593, §2.2)."""

    def __init__(self, config: KLConfig) -> None:
        self._adaptive = config.adaptive
        self.value = config.coef

    def follow(self, coef: float | None) -> None:
        """Take the coefficient that a batch was sealed with, unless it is steered here."""
        if self._adaptive is None and coef is not None:
            self.value = coef

    def adapt(self, kl_per_sequence: float, num_sequences: int) -> None:
        """Count one update.

        Args:
            kl_per_sequence: mean over sequences of the KL of a whole sequence, in nats.
        """
        if self._adaptive is not None:
            self.value = adapt_kl_coef(
                self.value,
                kl_per_sequence,
                target=self._adaptive.target,
                horizon=self._adaptive.horizon,
                num_sequences=num_sequences,
            )

    def state(self) -> dict[str, Tensor]:
        """The coefficient, where it changes."""
        return {"kl_coef": torch.tensor([self.value], dtype=torch.float64)} if self._adaptive is not None else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state``."""
        if self._adaptive is not None:
            self.value = float(state["kl_coef"][0])
