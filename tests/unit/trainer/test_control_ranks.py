"""The number of ranks changes nothing but rounding: every rule over episodes, over gloo.

The ranks add the same terms in another order; Adam with eps 1e-3 passes on at most lr / eps = 1 times an absolute error
of a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.ranks.sharding import BatchShard
from tests.unit.trainer.episode_batches import DISCRETE, group_of, job_of, spec_of

UPDATES, ATOL = 3, 2e-6
OPTIMIZER = {"learning_rate": 1e-3, "eps": 1e-3, "max_grad_norm": 0.5}
Run = tuple[dict[str, float], dict[str, NDArray[Any]]]
"""Metrics of the last update, and the state."""
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "ppo": ({"policy": OPTIMIZER, "value": OPTIMIZER}, "gaussian"),
    "grpo": ({"policy": OPTIMIZER}, "categorical"),
    "sac": (
        {**dict.fromkeys(("actor", "critic", "temperature"), OPTIMIZER), "batch_size": 33, "buffer": {"capacity": 50}},
        "squashed",
    ),
    "tiny": ({"type": "ppo", "policy": OPTIMIZER, "value": OPTIMIZER, "minibatches": 13}, "tokens"),
}


def trained(name: str, collective: Collective) -> Run:
    algorithm, kind = JOBS[name]
    job = job_of({"type": name, **algorithm}, {"type": kind})
    learner = EmbodiedLearner(job, DISCRETE if kind == "categorical" else spec_of(), collective=collective)
    lengths, count = ((8, 7), 1) if name == "tiny" else ((7, 6), 2)  # tiny: minibatches of which one rank has nothing
    batches = [
        [group_of(learner.policy, count * index + i, lengths=lengths) for i in range(count)] for index in range(UPDATES)
    ]
    reports = [learner.update(BatchShard.whole(groups), update_index=index) for index, groups in enumerate(batches)]
    state = learner.state()
    tensors = {**state.models["policy"].weights, **state.rule}
    return reports[-1], {name: tensor.numpy() for name, tensor in tensors.items()}


def train_all(world: World) -> list[Run]:
    return [trained(name, world.everybody) for name in JOBS]


@pytest.mark.long
@pytest.mark.slow
def test_ranks_agree(ranks: Any) -> None:
    """The batches do not divide evenly among the ranks."""
    alone = [trained(name, Alone()) for name in JOBS]
    first, second = ranks.run(2, train_all)
    for (metrics, state), (expected, own), (_, other) in zip(first, alone, second, strict=True):
        assert metrics.keys() == expected.keys()
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for name, array in own.items():
            assert np.array_equal(state[name], other[name]), f"{name}: ranks are equal to the bit"
            np.testing.assert_allclose(state[name], array, atol=ATOL, rtol=1e-5, err_msg=name)
