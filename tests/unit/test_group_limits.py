"""How large a group may be is decided when a job is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.config.evaluation_job import EvaluationJob
from penstock.shared.config.job import JobConfig
from penstock.shared.errors import ConfigError


def job(group_size: int, tokens: int) -> dict[str, Any]:
    return {
        "name": "large",
        "model": {"config": {"hidden_size": 64, "max_position_embeddings": 1 << 18}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "algorithm": {"group_size": group_size},
        "sampling": {"max_new_tokens": tokens},
        "train": {"batch_size": group_size, "max_updates": 1},
        "limits": {"byte_budget": 1 << 40},
    }


def test_a_group_may_take_many_messages() -> None:
    config = JobConfig.parse(job(16, 131_072))
    assert 8 << 20 < config.max_group_bytes <= 64 << 20


def test_a_group_above_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"more than a group may have \(67108864\).* lower algorithm.group_size"):
        JobConfig.parse(job(32, 131_072))


def evaluation(samples: int, tokens: int, **model: Any) -> dict[str, Any]:
    shared = {key: value for key, value in job(1, tokens).items() if key in ("name", "reward", "sampling", "limits")}
    return {
        **shared,
        "kind": "evaluation",
        "model": {"path": "/models/some", **model},
        "data": {"eval": {"type": "addition"}},
        "evaluation": {"num_prompts": 1, "samples": samples},
    }


def test_a_prompt_of_an_evaluation_is_bounded_too_and_counts_router_tables() -> None:
    assert EvaluationJob.parse(evaluation(8, 32_768)).max_group_bytes <= 64 << 20
    with pytest.raises(ConfigError, match=r"more than a group may have \(67108864\).* lower evaluation.samples"):
        EvaluationJob.parse(evaluation(128, 32_768))
    with pytest.raises(ConfigError, match="more than a group may have"):
        EvaluationJob.parse(evaluation(8, 32_768, moe={"router_replay": True, "replay_bytes_per_token": 4096}))
