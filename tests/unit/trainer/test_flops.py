"""The operation count of the utilisation metric against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.services.trainer.backends.local import open_local
from penstock.services.trainer.batch.packing import columns_of_rows, microbatches
from penstock.services.trainer.flops import ModelFlops, Work
from penstock.shared.config.jobs.job import JobConfig

ROWS = [([5, 6, 7], [8, 9, 2]), ([10], [11, 2]), ([12, 13, 14, 15], [16])]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_matrix_products_of_a_forward_pass(make_config: Callable[..., JobConfig], tied: bool, role: Any) -> None:
    architecture = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "tie_word_embeddings": tied}
    backend = open_local(make_config(algorithm={"type": "ppo"}, model={"config": architecture}), role, "cpu")
    (microbatch,) = microbatches(columns_of_rows(ROWS), np.arange(3), 1000)
    with FlopCounterMode(display=False) as counter:
        backend.score(microbatch)
    products = {torch.ops.aten.mm, torch.ops.aten.addmm}
    counted = sum(n for operator, n in counter.get_flop_counts()["Global"].items() if operator in products)
    work = Work()
    work.add(microbatch)
    flops = ModelFlops.of(backend.layout())
    attention = 2 * flops.attention_width * work.squares
    assert flops.forward(work) - attention == counted
    # two layers of 4 heads of 8; sequences of 5, 2 and 4 packed tokens
    assert attention == 2 * 2 * 32 * (25 + 4 + 16)


def test_a_training_pass_is_three_forwards_and_experts_count_by_share() -> None:
    layout = [
        ("model.embed_tokens.weight", (50, 8), torch.float32),
        ("model.layers.0.mlp.experts.down_proj", (4, 8, 16), torch.float32),
        ("model.norm.weight", (8,), torch.float32),
    ]
    assert ModelFlops.of(layout, expert_share=0.25) == ModelFlops(128.0, 400, 0)
    (microbatch,) = microbatches(columns_of_rows(ROWS), np.arange(3), 1000)
    once, thrice = Work(), Work()
    once.add(microbatch)
    thrice.add(microbatch, passes=3)
    thrice.add(None)
    assert (thrice.tokens, thrice.scored, thrice.squares) == (3 * once.tokens, 3 * once.scored, 3 * once.squares)
