"""Critic training within an actor-critic update: optimizer steps and their metrics.

Shape legend: N = scored tokens of the batch, M = scored tokens of a microbatch, L = this rank's flat completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.services.trainer.backends.base import Backend, Scores
from penstock.services.trainer.batch.minibatches import Minibatch
from penstock.services.trainer.batch.packing import Microbatch
from penstock.services.trainer.batch.statistics import optimizer_facts
from penstock.services.trainer.ranks.collective import Collective
from penstock.shared.algorithms.aggregation import token_mean
from penstock.shared.algorithms.statistics import moments
from penstock.shared.algorithms.value_loss import (
    clipped_value_loss,
    explained_variance,
    huber_error,
    squared_error,
    value_loss,
)
from penstock.shared.config.algorithm import CriticConfig

__all__ = ["CriticSteps", "value_facts"]


class CriticSteps:
    """Makes the critic's optimizer steps of one update, one for each minibatch.

    Args:
        values_L, returns_L: values before the update, and the returns to learn.
    """

    def __init__(
        self, backend: Backend, config: CriticConfig, values_L: Tensor, returns_L: Tensor, *, rate: float
    ) -> None:
        self._backend, self._config, self.rate = backend, config, rate
        self._values_L, self._returns_L = values_L, returns_L
        self._error = squared_error if config.huber_delta is None else partial(huber_error, delta=config.huber_delta)
        self.loss = 0.0
        self.grad_norms: list[float] = []

    def step(self, minibatch: Minibatch) -> float:
        """Make one optimizer step and return the gradient norm."""
        for microbatch in minibatch.microbatches:
            self._backend.accumulate(microbatch, self._loss_of(microbatch, minibatch.num_tokens))
        self.grad_norms.append(self._backend.step(self.rate))
        return self.grad_norms[-1]

    def report(self, collective: Collective) -> dict[str, float]:
        """Return the loss averaged over steps, and the optimizer's metrics."""
        steps = max(1, len(self.grad_norms))
        return {
            "loss/value": collective.sum({"loss": self.loss})["loss"] / steps,
            **optimizer_facts("critic", self.rate, self.grad_norms),
        }

    def _loss_of(self, microbatch: Microbatch | None, num_tokens: int) -> Callable[[Scores], Tensor]:
        def loss(scores: Scores) -> Tensor:
            assert microbatch is not None
            values_M = scores.values_M
            returns_M = self._returns_L[microbatch.source_M].to(values_M.device)
            if self._config.clip is None:
                loss_M = value_loss(values_M, returns_M, error=self._error)
            else:
                old_M = self._values_L[microbatch.source_M].to(values_M.device)
                loss_M = clipped_value_loss(values_M, old_M, returns_M, clip=self._config.clip, error=self._error)
            value = token_mean(loss_M, num_tokens=num_tokens)
            self.loss += float(value.detach())
            return value

        return loss


def value_facts(values_N: Tensor, returns_N: Tensor) -> dict[str, float]:
    """Return metrics of how well the values before the update predict the returns."""
    every_N = torch.ones(len(values_N), dtype=torch.bool)
    residuals = moments(returns_N - values_N, every_N)
    return {
        "critic/value": float(values_N.double().mean()),
        "critic/return": float(returns_N.double().mean()),
        "critic/explained_variance": explained_variance(residuals, moments(returns_N, every_N)),
    }
