"""A batch in Penstock's own terms: a job, groups, and packed microbatches."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.services.trainer.batch.packing import Columns, Microbatch, columns_of, microbatches
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group
from steps.workload import CLIP, LEARNING_RATE, MAX_GRAD_NORM, Batch, Workload

__all__ = ["groups_of", "job", "packed"]


def job(workload: Workload, *, model: Path | None = None, dtype: str = "float32") -> JobConfig:
    """GRPO with one optimizer step for each batch; without ``model`` its weights are random."""
    source = {"path": str(model)} if model is not None else {"config": workload.architecture, "tokenizer": "char"}
    return JobConfig.parse(
        {
            "name": f"step-{workload.name}",
            "model": {**source, "dtype": dtype},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "algorithm": {"type": "grpo", "group_size": workload.group_size, "clip_low": CLIP, "clip_high": CLIP},
            "sampling": {"max_new_tokens": workload.completion_tokens[1]},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM},
            "train": {"batch_size": workload.completions, "max_updates": 1_000_000},
        }
    )


def groups_of(batch: Batch) -> list[Group]:
    """As a sampler and a scorer would have sent them."""
    return [_group(batch, number) for number in range(len(batch.prompts))]


def packed(batch: Batch, max_tokens: int) -> tuple[Columns, list[Microbatch]]:
    """All completions, as the trainer packs them."""
    columns = columns_of(groups_of(batch))
    return columns, microbatches(columns, np.arange(len(batch.completions)), max_tokens)


def _group(batch: Batch, number: int) -> Group:
    size = batch.group_size
    rows = slice(number * size, (number + 1) * size)
    ends = np.cumsum([len(row) for row in batch.completions[rows]])
    members = np.arange(size)
    starts = np.concatenate([[0], ends[:-1]])
    return Group(
        job="step",
        draw=Draw(number),
        attempt="",
        epoch=0,
        prompt_ids=batch.prompts[number].astype(np.int32),
        token_ids=np.concatenate(batch.completions[rows]).astype(np.int32),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        logprobs=np.concatenate(batch.logprobs[rows]),
        mask=np.ones(ends[-1], np.uint8),
        rewards=batch.rewards_B[rows],
        failed=np.zeros(size, np.bool_),
        finish=np.full(size, FINISH_REASONS.index("stop"), np.uint8),
        spans=np.stack([members, np.zeros_like(members), starts, ends], 1).astype(np.int32),
    )
