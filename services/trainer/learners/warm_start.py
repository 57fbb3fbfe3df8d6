"""Supervised training before version 0, so that reinforcement learning starts from some successes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from penstock.services.trainer.backends.base import Backend, Scores
from penstock.services.trainer.batch.packing import Columns, columns_of_rows, microbatches
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.schedule import decay
from penstock.shared.algorithms.aggregation import token_mean
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import Demonstration

__all__ = ["warm_start"]


def warm_start(
    backend: Backend,
    batches: Iterable[Sequence[Demonstration]],
    config: JobConfig,
    collective: Collective,
    *,
    eos: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Minimise the cross-entropy of the answer tokens and the end of sequence: one optimizer step per batch.

    The learning rate follows ``warm_start.schedule``; other optimizer settings are the job's. Afterwards the optimizer
    is reset, and the resulting weights become the reference policy, unless the job names another one. In a job with
    adapters, the warm start trains the base weights instead.

    Args:
        batches: demonstrations of each step, the same on every rank; a rank trains its share of the rows.
        eos: token id of the end of sequence, appended to answers that do not end with it.
        on_step: called with the number of the step, from 1, and its mean loss in nats per token.

    Raises:
        ProtocolError: a prompt is empty.
    """
    warm = config.warm_start
    backend.new_optimizer(config.optimizer, whole=True)
    for step, rows in enumerate(batches, start=1):
        ended = [row if row.answer_ids and row.answer_ids[-1] == eos else row.extended(eos) for row in rows]
        num_tokens = sum(sum(row.mask) for row in ended)
        own = ended[collective.rank :: collective.size]
        columns = columns_of_rows([(row.prompt_ids, row.answer_ids) for row in own], [row.mask for row in own])
        rate = warm.learning_rate * decay(warm.schedule, (step - 1) / max(1, warm.steps), warm.min_lr_ratio)
        on_step(step, _step(backend, columns, collective, config, num_tokens=num_tokens, rate=rate))
    backend.new_optimizer(config.optimizer)
    if config.algorithm.kl is None or config.algorithm.kl.reference is None:
        backend.freeze_reference()


def _step(
    backend: Backend, columns: Columns, collective: Collective, config: JobConfig, *, num_tokens: int, rate: float
) -> float:
    losses: list[float] = []

    def loss(scores: Scores) -> Tensor:
        value = token_mean(-scores.values_M, num_tokens=num_tokens)
        losses.append(float(value.detach()))
        return value

    own = microbatches(columns, np.arange(len(columns.group_B)), config.train.max_tokens_per_microbatch)
    most = int(collective.max({"microbatches": float(len(own))})["microbatches"])
    for microbatch in [*own, *[None] * (most - len(own))]:
        backend.accumulate(microbatch, loss)
    backend.step(rate)
    return collective.sum({"loss": sum(losses)})["loss"]
