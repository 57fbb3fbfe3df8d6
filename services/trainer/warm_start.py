"""Supervised training before version 0, so that reinforcement learning has something to reinforce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from penstock.services.trainer.backends.base import Backend
from penstock.services.trainer.packing import Columns, columns_of_rows, microbatches
from penstock.shared.algorithms.aggregation import token_mean
from penstock.shared.config.job import JobConfig

__all__ = ["warm_start"]


def warm_start(
    backend: Backend,
    batches: Iterable[Sequence[tuple[list[int], list[int]]]],
    config: JobConfig,
    *,
    eos: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Cross-entropy on the answer tokens and the end of sequence: one optimizer step for each batch.

    The learning rate is constant; everything else of the optimizer is the job's. Afterwards the optimizer starts anew,
    and the weights reached are the reference policy.

    Args:
        batches: rows of (prompt ids, answer ids); ``eos`` is appended where the answer does not end with it.
        on_step: called with the number of the step, from 1, and its mean loss in nats per token.

    Raises:
        ProtocolError: a prompt is empty.
    """
    rate = config.warm_start.learning_rate
    backend.new_optimizer(config.optimizer)
    for step, rows in enumerate(batches, start=1):
        columns = columns_of_rows([(p, a if a and a[-1] == eos else [*a, eos]) for p, a in rows])
        on_step(step, _step(backend, columns, config.train.max_tokens_per_microbatch, rate))
    backend.new_optimizer(config.optimizer)
    backend.freeze_reference()


def _step(backend: Backend, columns: Columns, max_tokens: int, rate: float) -> float:
    losses: list[float] = []
    num_tokens = int(columns.scored_B.sum())

    def loss(logprobs_M: Tensor, entropy_M: Tensor | None) -> Tensor:
        value = token_mean(-logprobs_M, num_tokens=num_tokens)
        losses.append(float(value.detach()))
        return value

    for microbatch in microbatches(columns, np.arange(len(columns.group_B)), max_tokens):
        backend.accumulate(microbatch, loss, temperature=1.0, entropy=False)
    backend.step(rate)
    return sum(losses)
