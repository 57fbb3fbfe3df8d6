"""Sections about experts and adapters: contradictions are refused with their key."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.errors import ConfigError

MOE = {"arch": "qwen3_moe", "experts": {"number": 8, "per_token": 2}}


def model(**sections: Any) -> ModelConfig:
    return ModelConfig.parse({"config": {}, "tokenizer": "char", **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"config": {"arch": "qwen3_moe"}}, "needs experts"),
        ({"config": {"experts": {}}}, "experts need arch 'qwen3_moe'"),
        ({"config": {"arch": "qwen3_moe", "experts": {"number": 2, "per_token": 3}}}, "per_token 3"),
        ({"moe": {}}, "has no routers"),
        ({"config": None, "path": "m", "moe": {"router_replay": True}}, "replay_bytes_per_token"),
        ({"config": MOE, "moe": {"replay_bytes_per_token": 4}}, "read with router_replay only"),
        ({"config": MOE, "moe": {"aux_loss_coef": 0.1}, "lora": {}}, "nothing to balance"),
        ({"lora": {"rank": 0}}, "rank"),
        ({"lora": {"dropout": 0.1}}, "unknown key"),
        ({"lora": {"target_modules": "some"}}, "target_modules"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(**sections)


@pytest.mark.parametrize(("number", "nbytes"), [(8, 4 * 2), (300, 4 * 2 * 2)])
def test_the_size_of_a_router_table(number: int, nbytes: int) -> None:
    config = {"arch": "qwen3_moe", "num_layers": 4, "experts": {"number": number, "per_token": 2}}
    assert model(config=config, moe={"router_replay": True}).replay_bytes_per_token == nbytes
    assert model(config=config, moe={}).replay_bytes_per_token == 0
    assert (
        model(config=None, path="m", moe={"router_replay": True, "replay_bytes_per_token": 384}).replay_bytes_per_token
        == 384
    )


def test_completions_leave_room_for_a_prompt() -> None:
    job = {
        "name": "x", "model": {"config": {"max_position_embeddings": 32}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}}, "reward": {"scorers": [{"type": "exact"}]},
        "train": {"batch_size": 16, "max_updates": 1}, "algorithm": {"group_size": 4},
    }  # fmt: skip
    JobConfig.parse({**job, "sampling": {"max_new_tokens": 31}})
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens 32 leaves no room for a prompt.* 32 tokens"):
        JobConfig.parse({**job, "sampling": {"max_new_tokens": 32}})
    with pytest.raises(ConfigError, match=r"evaluation.sampling.max_new_tokens 64 leaves no room"):
        changes = {"sampling": {"max_new_tokens": 4}, "evaluation": {"sampling": {"max_new_tokens": 64}}}
        JobConfig.parse({**job, **changes})
