"""Groups as rows for people: one row per completion. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.shared.protocol.trajectory import FINISH_REASONS, Group

__all__ = ["sample_rows"]


def sample_rows(step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One row per completion of a batch, in batch order."""
    rows = []
    for group in groups:
        usable = group.rewards[~group.failed]
        mean = float(usable.mean()) if len(usable) else 0.0
        std = float(usable.std(ddof=1)) if len(usable) > 1 else 0.0
        completions = group.meta.get("completions") or [""] * group.num_trajectories
        for index in range(group.num_trajectories):
            mine = group.spans[group.spans[:, 0] == index][:, 1]
            start, end = int(group.cu_seqlens[index]), int(group.cu_seqlens[index + 1])
            reward = float(group.rewards[index])
            rows.append(
                {
                    "id": f"{step}-{group.draw}-{index}",
                    "step": step,
                    "draw": str(group.draw),
                    "index": index,
                    "prompt": group.meta.get("prompt", ""),
                    "completion": completions[index],
                    "answer": group.meta.get("answer"),
                    "reward": reward,
                    "parts": {name: float(values[index]) for name, values in group.parts.items()},
                    "advantage": 0.0 if group.failed[index] or std == 0 else (reward - mean) / (std + 1e-6),
                    "failed": bool(group.failed[index]),
                    "finish": FINISH_REASONS[int(group.finish[index])],
                    "tokens": end - start,
                    "logprob": float(np.sum(group.logprobs[start:end])),
                    "min_version": int(mine.min()) if len(mine) else 0,
                    "max_version": int(mine.max()) if len(mine) else 0,
                    "worker": group.meta.get("worker", ""),
                }
            )
    return rows
