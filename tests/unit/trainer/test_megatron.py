"""The learner on a model that megatron-core splits in two: the same updates, and checkpoints that change backends.

Float32, bounds as in ``test_fsdp.py``: Adam with eps 1e-3 and learning rate 1e-2 passes the rounding of a gradient on
at most tenfold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.services.trainer.checkpoint.state import help_save, list_checkpoints, load_checkpoint, save_checkpoint
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.trajectory import Group

Batches = list[list[Group]]
Run = tuple[list[dict[str, float]], dict[str, NDArray[np.float32]]]
"""Metrics of each update, and the weights after the last."""

HEADS = {"type": "megatron", "tensor_parallel": 2, "sequence_parallel": True}
STAGES = {"type": "megatron", "pipeline_parallel": 2}
CUTS = {"grpo": (HEADS, STAGES), "ppo": (STAGES, HEADS)}
"""How the model is split at first, and again after `local` has loaded it."""
SECTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"group_size": 4, "kl": {"coef": 0.1, "estimator": "full"}, "entropy_coef": 0.01}},
    "ppo": {
        "algorithm": {"type": "ppo", "group_size": 4, "critic": {"optimizer": {"learning_rate": 1e-2, "eps": 1e-3}}}
    },
}
COMMON = {"train": {"minibatches": 2, "max_tokens_per_microbatch": 48}, "optimizer": {"eps": 1e-3}}


def train(collective: Collective, config: JobConfig, batches: Batches, load: Path | None) -> tuple[Learner, Run]:
    learner = Learner(config, collective=collective)
    if load is not None:
        learner.load_state(load_checkpoint(load).state)
    metrics = [learner.update(BatchShard.whole(groups), update_index=i) for i, groups in enumerate(batches)]
    return learner, (metrics, {name: tensor.float().clone().numpy() for name, tensor in learner.weights()})


def train_on_rank(world: World, config: JobConfig, batches: Batches, load: Path | None, save: Path) -> Run:
    """Train every group on each rank, since both hold parts of one copy; save a checkpoint; return the results."""
    learner, run = train(world.data_parallel(config.backend.model_parallel), config, batches, load)
    state = learner.state()
    if world.place.rank == 0:
        save_checkpoint(save, "job_1", len(batches), state, {}, token="t", ranks=world.checkpoints)
    else:
        help_save(save, "job_1", len(batches), state, token="t", ranks=world.checkpoints)
    return run


@pytest.mark.long
@pytest.mark.timeout(300)  # ranks start slowly on a loaded machine
@pytest.mark.parametrize("name", SECTIONS)
def test_two_parts_train_the_same_policy(
    name: str, ranks: Any, make_config: Callable[..., JobConfig], make_group: Callable[..., Group], tmp_path: Path
) -> None:
    batches = [[make_group(4 * n + i, [1, 0, 0.5, i % 2], masked=0.2 * i) for i in range(4)] for n in range(3)]
    backends = [{"backend": backend} for backend in CUTS[name]]
    cut, cut_again, whole = (make_config(**COMMON, **SECTIONS[name], **extra) for extra in (*backends, {}))
    _, (metrics, weights) = train(Alone(), whole, batches, None)

    first = ranks.run(2, train_on_rank, cut, batches[:2], None, tmp_path / "cut")
    for found_metrics, _ in first:
        for ours, theirs in zip(found_metrics, metrics, strict=False):
            for key in ("loss/total", "policy/entropy", "optimizer/grad_norm", "mismatch/logprob"):
                assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), key
    path = list_checkpoints(tmp_path / "cut", "job_1")[-1].path

    resumed, _ = train(Alone(), whole, [], path)  # `local` takes over, bit for bit
    assert all(np.array_equal(first[0][1][name], tensor.numpy()) for name, tensor in resumed.weights())
    exported = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    assert all(np.array_equal(exported[name].detach().numpy(), value) for name, value in first[0][1].items())
    assert AutoTokenizer.from_pretrained(path)("1+2=")["input_ids"]

    back = save_checkpoint(tmp_path / "whole", "job_1", 2, resumed.state(), {})
    for _, found in ranks.run(2, train_on_rank, cut_again, batches[2:], back, tmp_path / "again"):
        assert max(np.abs(found[name] - value).max() for name, value in weights.items()) <= 1e-5
