"""The number of ranks changes nothing but rounding: metrics, gradients and weights of every algorithm, over gloo.

Float32, six optimizer steps. The ranks sum the same terms in another order, which costs some ulp of each gradient; Adam
with eps 1e-3 passes on at most lr / eps = 1 times an absolute error of the gradient, and the first moments show the
gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.ranks.sharding import BatchShard, assign
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]
Batches = list[list[Group]]
Tensors = dict[str, NDArray[np.float32]]
Run = tuple[dict[str, float], Tensors, Tensors]
"""Metrics of the last update, weights, and the state of the update rule."""

UPDATES = 3
ATOL = 1e-6

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "dual_clip": 3.0},
    "dr_grpo": {"kl": {"coef": 0.1, "place": "reward", "adaptive": {"target": 0.1, "horizon": 100}}},
    "dapo": {"overlong_filter": True},
    "rloo": {"aggregation": "sequence_mean"},
    "reinforce_pp": {"gamma": 0.9, "kl": {"coef": 0.1, "place": "reward"}},
    "reinforce_pp_baseline": {"shaping": {"normalise": True, "clip": [-1, 1]}},
    "remax": {"proximal": "recomputed"},
    "ppo": {"lam": 0.9, "gamma": 0.99, "critic": {"optimizer": {"learning_rate": 1e-3, "eps": 1e-3}}},
    "gspo": {"clip_low": 0.5, "clip_high": 0.5},
    "cispo": {"proximal": "recomputed", "importance": {"type": "tis", "level": "sequence"}, "kl": {"coef": 0.1}},
    "distillation": {"gamma": 0.5, "entropy_coef": 0.01},
}


@pytest.fixture
def configs(make_config: Config, make_teacher: Callable[..., str]) -> Callable[[str], dict[str, JobConfig]]:
    """Return a function that builds a job for every algorithm on a backend."""
    needed = {"distillation": {"teacher": make_teacher()}}

    def make(backend: str) -> dict[str, JobConfig]:
        return {
            name: make_config(
                algorithm={"type": name, "group_size": 4, **keys, **needed.get(name, {})},
                train={"batch_size": 24, "minibatches": 2, "max_tokens_per_microbatch": 160},
                optimizer={"learning_rate": 1e-3, "eps": 1e-3, "max_grad_norm": 0.5},
                backend={"type": backend},
            )
            for name, keys in ALGORITHMS.items()
        }

    return make


@pytest.fixture
def batches(make_group: Callable[..., Group]) -> Batches:
    """Return ragged groups with failures, truncations, masked tokens and greedy baselines; one group fails entirely."""
    found = []
    for update in range(UPDATES):
        groups = [
            make_group(10 * update + i, [1, 0, 0.5, i % 2, 1], masked=0.2 * (i % 2), failed=[i] if i < 2 else [])
            for i in range(6)
        ]
        groups[3] = replace(groups[3], failed=np.array([True] * 4 + [False]))
        found.append([replace(group, greedy=np.arange(5) == 4) for group in groups])
    return found


def shard_of(groups: list[Group], collective: Collective, *, minibatches: int) -> BatchShard:
    """Return the groups that this rank trains."""
    tokens = [len(g.token_ids) + len(g.prompt_ids) * g.num_trajectories for g in groups]
    owner = assign(tokens, minibatches=minibatches, ranks=collective.size)
    own = np.flatnonzero(owner == collective.rank).tolist()
    return BatchShard([groups[i] for i in own], own, len(groups))


def train(collective: Collective, config: JobConfig, batches: Batches) -> Run:
    """Train all updates on one rank; return the results."""
    learner = Learner(config, collective=collective)
    metrics: dict[str, float] = {}
    for index, groups in enumerate(batches):
        shard = shard_of(groups, collective, minibatches=config.train.minibatches)
        metrics = learner.update(shard, update_index=index)
    weights = {name: tensor.clone().numpy() for name, tensor in learner.weights()}
    return metrics, weights, {name: tensor.numpy() for name, tensor in learner.state().rule.items()}


def train_all(world: World, configs: dict[str, JobConfig], batches: Batches) -> dict[str, Run]:
    """Train every algorithm, one after another; return the results by name."""
    return {name: train(world.everybody, config, batches) for name, config in configs.items()}


def refusal(world: World, config: JobConfig, groups: list[Group]) -> str:
    """Return why this rank refuses to train a batch, or '' if it trains it."""
    learner = Learner(config, collective=world.everybody)
    try:
        learner.update(shard_of(groups, world.everybody, minibatches=1), update_index=0)
    except ProtocolError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_agree_on_every_algorithm(
    ranks: Any, configs: Callable[[str], dict[str, JobConfig]], batches: Batches
) -> None:
    alone = {name: train(Alone(), config, batches) for name, config in configs("local").items()}
    for size in (2, 3):
        for found in ranks.run(size, train_all, configs("fsdp"), batches):
            for name, (metrics, weights, rule) in found.items():
                expected, own, remembered = alone[name]
                assert metrics.keys() == expected.keys()
                for key in (key for key in metrics if not key.startswith(("update_s/", "speed/"))):
                    assert metrics[key] == pytest.approx(expected[key], abs=2e-5, rel=1e-4), (size, name, key)
                worst = max(np.abs(weights[key] - value).max() for key, value in own.items())
                assert worst <= ATOL, (size, name, worst)
                assert rule.keys() == remembered.keys()
                assert all(np.allclose(rule[key], value, rtol=1e-5) for key, value in remembered.items())


@pytest.mark.slow
def test_every_rank_refuses_an_untrainable_batch_and_a_rank_may_be_idle(
    ranks: Any, make_config: Config, make_group: Callable[..., Group]
) -> None:
    config = make_config(backend={"type": "fsdp"})
    failed = [make_group(i, failed=[0, 1, 2, 3]) for i in range(4)]
    reason = "all 16 trajectories of the batch failed: nothing to train on"
    assert ranks.run(2, refusal, config, failed) == [reason] * 2
    assert ranks.run(3, refusal, config, [make_group(0), make_group(1)]) == [""] * 3
    groups = [make_group(i) for i in range(4)]
    groups[1] = replace(groups[1], prompt_ids=groups[1].prompt_ids[:0])
    errors = ranks.run(2, refusal, config, groups)
    assert errors[0] == errors[1]
    assert "has an empty prompt" in errors[0]
