"""Models that cannot be split are refused when the job file is read, with advice."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.config.backend import MegatronConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel"),
        ({"sequence_parallel": True}, "sequence_parallel needs tensor_parallel > 1"),
        ({"tensor_paralel": 2}, "did you mean 'tensor_parallel'"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
    ],
)
def test_invalid_sections_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MegatronConfig.parse({"type": "megatron", **section}, where="backend")


SPARSE = {"arch": "qwen3_moe", "experts": {"number": 6}}


@pytest.mark.parametrize(
    ("cut", "model", "message"),
    [
        ("tensor", {"config": {"num_kv_heads": 2, "num_heads": 4}}, "4 does not divide the 2 key/value heads"),
        ("tensor", {"config": {"num_kv_heads": 4, "intermediate_size": 510}}, "divide model.config.intermediate_size"),
        ("tensor", {"config": {"num_kv_heads": 4}, "lora": {}}, "has no adapters"),
        ("pipeline", {"config": {"num_layers": 6}}, "pipeline_parallel 4 does not divide the 6 layers"),
        ("expert", {"config": SPARSE}, "expert_parallel 4 does not divide the 6 experts"),
        ("expert", {"config": {}}, "model.config has no experts"),
    ],
)
def test_models_that_cannot_be_split_are_refused(cut: str, model: dict[str, Any], message: str) -> None:
    job = {
        "name": "cut",
        "model": {"tokenizer": "char", **model},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "train": {"max_updates": 1},
        "backend": {"type": "megatron", f"{cut}_parallel": 4},
    }
    with pytest.raises(ConfigError, match=message):
        JobConfig.parse(job)


def test_the_number_of_ranks_that_share_a_copy() -> None:
    assert MegatronConfig(type="megatron", tensor_parallel=4, context_parallel=2).model_parallel == 8
    assert MegatronConfig(type="megatron", pipeline_parallel=3, expert_parallel=2).model_parallel == 3


def test_pipeline_stages_do_not_divide_the_heads() -> None:
    job = {
        "name": "stages", "model": {"tokenizer": "char", "config": {"num_layers": 6, "num_kv_heads": 2}},
        "data": {"train": {"type": "addition"}}, "reward": {"scorers": [{"type": "exact"}]},
        "train": {"max_updates": 1}, "backend": {"type": "megatron", "tensor_parallel": 2, "pipeline_parallel": 3},
    }  # fmt: skip
    assert JobConfig.parse(job).backend.model_parallel == 6
