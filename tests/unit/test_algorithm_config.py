"""The section `algorithm` of job files: properties and defaults of each algorithm, and settings that are refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from penstock.shared.config.algorithm import AlgorithmConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ConfigError

TYPES = [model.model_fields["type"].default for model in get_args(get_args(AlgorithmConfig)[0])]


NEEDED = {"distillation": {"teacher": "some/model"}}


def algorithm(**keys: Any) -> AlgorithmConfig:
    return JobConfig.parse(
        {
            "name": "tiny",
            "model": {"config": {}, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "train": {"batch_size": 32, "max_updates": 1},
            **({"algorithm": keys} if keys else {}),
        }
    ).algorithm


def test_all_algorithms_are_there() -> None:
    assert TYPES == [
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "remax",
        "ppo",
        "gspo",
        "cispo",
        "distillation",
    ]


def test_the_default_algorithm_is_grpo() -> None:
    assert algorithm().type == "grpo"
    assert algorithm(group_size=4).type == "grpo"


@pytest.mark.parametrize("name", TYPES)
def test_every_algorithm_has_consistent_properties(name: str) -> None:
    config = algorithm(type=name, **NEEDED.get(name, {}))
    assert config.type == name
    assert 1 <= config.smallest_group <= config.group_size
    assert config.aggregation in ("token_mean", "sequence_mean", "constant")
    assert config.needs_critic == (config.critic is not None) == (name == "ppo")
    assert config.greedy_baseline == (name == "remax")
    assert (config.dynamic_sampling is not None) == (name == "dapo")
    assert (config.overlong_punishment is not None) == (name == "dapo")
    assert not config.needs_reference


@pytest.mark.parametrize(
    ("name", "value"), [("dr_grpo", "constant"), ("dapo", "token_mean"), ("gspo", "sequence_mean")]
)
def test_an_aggregation_that_an_algorithm_fixes_cannot_be_set(name: str, value: str) -> None:
    assert algorithm(type=name).aggregation == value
    with pytest.raises(ConfigError, match=rf"algorithm\.aggregation: unknown key of '{name}'"):
        algorithm(type=name, aggregation=value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gspo", "dual_clip"),
        ("cispo", "dual_clip"),
        ("rloo", "scale_by_std"),
        ("dr_grpo", "scale_by_std"),
        ("grpo", "lam"),
        ("grpo", "gamma"),
        ("grpo", "critic"),
        ("ppo", "dynamic_sampling"),
        ("remax", "dynamic_sampling"),
        ("reinforce_pp", "lam"),
        ("distillation", "shaping"),
        ("distillation", "overlong_punishment"),
    ],
)
def test_a_key_that_an_algorithm_does_not_use_is_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}: unknown key of '{name}'"):
        algorithm(type=name, **NEEDED.get(name, {}), **{key: 1})


def test_distillation_refuses_a_kl_penalty_in_the_reward() -> None:
    keys = {"type": "distillation", **NEEDED["distillation"]}
    assert algorithm(**keys, kl={"coef": 0.1}).needs_reference
    with pytest.raises(ConfigError, match="rewards are not trained on here"):
        algorithm(**keys, kl={"coef": 0.1, "place": "reward"})


@pytest.mark.parametrize("name", ["ppo", "remax", "reinforce_pp"])
def test_some_algorithms_allow_groups_of_one(name: str) -> None:
    assert algorithm(type=name, group_size=1).smallest_group == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "grp"}, r"type: found 'grp'; did you mean 'grpo'\? there are: 'grpo', 'dr_grpo'"),
        ({"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ({"type": "rloo", "group_size": 1}, "greater than or equal to 2"),
        ({"group_size": 4, "min_group": 5}, r"must lie in 2\.\.group_size \(4\)"),
        ({"group_size": 4, "min_group": 1}, r"must lie in 2\.\.group_size \(4\)"),
        ({"kl": {"coef": 0.1, "estimator": "k1"}}, "k1 has no gradient in the loss"),
        ({"kl": {"coef": 0.1, "place": "reward", "estimator": "full"}}, "full is a term of the loss"),
        ({"kl": {"coef": 0}}, "greater than 0"),
        ({"importance": {"type": "tis"}}, "needs 'proximal: recomputed'"),
        ({"proximal": "recomputed", "importance": {"type": "tis", "low": 0.5}}, "unknown key"),
        ({"proximal": "recomputed", "importance": {"type": "icepop", "low": 2.0}}, "less than 1"),
        ({"shaping": {"clip": [1.0, -1.0]}}, "smaller bound first"),
        ({"overlong_punishment": {"buffer": 1.5}}, "less than or equal to 1"),
        ({"dual_clip": 1.0}, "greater than 1"),
    ],
)
def test_an_invalid_section_is_refused_with_the_reason(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(**keys)


def test_the_default_kl_estimator_is_k1_in_the_reward_and_k3_in_the_loss() -> None:
    in_reward = algorithm(kl={"coef": 0.1, "place": "reward"})
    assert in_reward.kl is not None
    assert in_reward.kl.estimator == "k1"
    in_loss = algorithm(kl={"coef": 0.1})
    assert in_loss.kl is not None
    assert in_loss.kl.estimator == "k3"
    assert in_loss.needs_reference


def test_defaults_of_the_papers() -> None:
    dapo, gspo, cispo = (algorithm(type=name) for name in ("dapo", "gspo", "cispo"))
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert (cispo.clip_low, cispo.clip_high) == (1.0, 4.0)
