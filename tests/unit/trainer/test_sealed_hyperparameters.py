"""What a batch was sealed with holds for its update, whatever the job file says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from penstock.services.trainer.learner import Learner
from penstock.services.trainer.sharding import BatchShard
from penstock.services.trainer.update_rules.kl_coefficient import KLCoefficient
from penstock.shared.config.correction import KLConfig
from penstock.shared.config.job import JobConfig
from penstock.shared.protocol.events import Hyperparameters
from penstock.shared.protocol.trajectory import Group


def trained(config: JobConfig, groups: list[Group], sealed: Hyperparameters | None) -> dict[str, torch.Tensor]:
    learner = Learner(config)
    learner.update(replace(BatchShard.whole(groups), hyperparameters=sealed), update_index=3)
    return {name: tensor.clone() for name, tensor in learner.weights()}


def test_a_batch_is_trained_as_if_the_job_had_always_been_so(
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


def test_an_adaptive_coefficient_is_not_overruled() -> None:
    fixed, steered = KLConfig(coef=0.1), KLConfig.model_validate({"coef": 0.1, "adaptive": {"target": 1.0}})
    for config, value in ((fixed, 0.3), (steered, 0.1)):
        coefficient = KLCoefficient(config)
        coefficient.follow(0.3)
        assert coefficient.value == value
        coefficient.follow(None)
        assert coefficient.value == value
