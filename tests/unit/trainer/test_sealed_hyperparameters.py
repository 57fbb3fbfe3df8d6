"""Sealed hyper-parameters hold for the update of their batch, whatever the job file says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.services.trainer.backends.local import open_local
from penstock.services.trainer.batch.packing import columns_of, microbatches
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.services.trainer.update_rules.on_policy import KLCoefficient
from penstock.shared.config.correction import KLConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.events import Hyperparameters
from penstock.shared.protocol.trajectory import Group


def trained(config: JobConfig, groups: list[Group], sealed: Hyperparameters | None) -> dict[str, torch.Tensor]:
    learner = Learner(config)
    learner.update(replace(BatchShard.whole(groups), hyperparameters=sealed), update_index=3)
    return {name: tensor.clone() for name, tensor in learner.weights()}


def test_a_batch_is_trained_as_if_the_job_had_always_had_its_settings(
    make_config: Callable[..., JobConfig], make_group: Callable[..., Group]
) -> None:
    groups = [make_group(ordinal, seed=ordinal) for ordinal in range(4)]
    old = make_config(optimizer={"schedule": "linear"}, algorithm={"kl": {"coef": 0.1}})
    new = make_config(
        optimizer={"schedule": "linear", "learning_rate": 3e-3},
        algorithm={"kl": {"coef": 0.4}},
        train={"max_updates": 7},
    )
    sealed = Hyperparameters(learning_rate=3e-3, kl_coef=0.4, max_updates=7)
    amended, native = trained(old, groups, sealed), trained(new, groups, None)
    assert all(torch.equal(amended[name], native[name]) for name in native)
    before = trained(old, groups, None)
    assert any(not torch.equal(before[name], native[name]) for name in native)


def test_a_batch_of_several_temperatures_is_on_policy_at_each_of_them(
    make_config: Callable[..., JobConfig], make_group: Callable[..., Group]
) -> None:
    """The trainer computes log-probs at the temperature of each group, and ignores that of the job file."""
    config = make_config(algorithm={"kl": {"coef": 0.1}}, sampling={"temperature": 0.4})
    sampler, groups = open_local(config, "policy", "cpu"), []
    for ordinal, temperature in enumerate((0.7, 1.0, 1.5, 0.7)):
        group = replace(make_group(ordinal, seed=ordinal), temperature=temperature)
        (microbatch,) = microbatches(columns_of([group]), np.arange(4), 10_000)
        logprobs = np.zeros_like(group.logprobs)
        logprobs[microbatch.source_M] = sampler.score(microbatch)
        groups.append(replace(group, logprobs=logprobs))
    shard = BatchShard.whole(groups)
    metrics = Learner(config).update(shard, update_index=0)
    assert metrics["mismatch/logprob"] < 1e-6
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/kl_ref"] == pytest.approx(0, abs=1e-6), "the reference is the same policy"
    wrong = BatchShard.whole([replace(group, temperature=1.0) for group in groups])
    assert Learner(config).update(wrong, update_index=0)["mismatch/logprob"] > 1e-3
    warmer = make_config(algorithm={"kl": {"coef": 0.1}}, sampling={"temperature": 1.3})
    one, two = (Learner(config), Learner(warmer))
    for learner in (one, two):
        learner.update(shard, update_index=0)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.weights(), two.weights(), strict=True))


def test_greedy_completions_are_not_trained(make_group: Callable[..., Group]) -> None:
    with pytest.raises(ProtocolError, match="temperature 0"):
        columns_of([replace(make_group(0), temperature=0.0)])


def test_an_adaptive_coefficient_is_not_overruled() -> None:
    fixed, steered = KLConfig(coef=0.1), KLConfig.model_validate({"coef": 0.1, "adaptive": {"target": 1.0}})
    for config, value in ((fixed, 0.3), (steered, 0.1)):
        coefficient = KLCoefficient(config)
        coefficient.follow(0.3)
        assert coefficient.value == value
        coefficient.follow(None)
        assert coefficient.value == value
