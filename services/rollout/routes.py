"""The router table of a group, from those of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.generation import Sample

__all__ = ["group_experts"]


def group_experts(samples: Sequence[Sample], num_prompt: int) -> NDArray[Any] | None:
    """Experts of the prompt and then of every completion, one after another; None where nothing was recorded.

    The completions share the prompt's rows: they are those of the first sample. The last token of a completion went
    through no layer and has a row of zeros, as have completions that ended before they began.
    """
    recorded = [sample.experts for sample in samples if sample.experts is not None]
    if not recorded:
        return None
    empty = np.zeros((1, *recorded[0].shape[1:]), recorded[0].dtype)
    parts = [recorded[0][:num_prompt]]
    for sample in samples:
        length = len(sample.token_ids)
        if length and sample.experts is not None:
            parts += [sample.experts[num_prompt:], empty]
        else:
            parts.append(np.repeat(empty, length, 0))
    return np.concatenate(parts)
