"""The size limit of groups is checked when a job is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.submission import check_groups
from penstock.shared.config.data import DataConfig
from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.config.jobs.job import ROW_BYTES, JobConfig
from penstock.shared.data.check import check_data
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


def test_the_bytes_of_a_data_row_count_above_a_base_amount(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "tests": "x" * size}) + "\n" for size in (10, 5000, 20)))
    data = {"train": {"type": "file", "path": str(path)}, "prompt": {"answer": None}}
    found = check_data(DataConfig.parse(data))
    assert 5000 < found.row_bytes + ROW_BYTES < 5100
    assert check_data(DataConfig.parse({"train": {"type": "addition"}})).row_bytes == 0


def test_a_job_whose_rows_do_not_fit_is_refused() -> None:
    spec = {**job(8, 64), "limits": {"byte_budget": 1 << 20}}
    config = JobConfig.parse(spec)
    check_groups(config, 0, stores_parts=True)
    need = 2 * 2 * (config.max_group_bytes + 600_000)
    with pytest.raises(ConfigError, match=rf"a data row of up to 601024 bytes must fit.* to at least {need}$"):
        check_groups(config, 600_000, stores_parts=True)
    with pytest.raises(ConfigError, match=r"more than a group may have \(67108864\)"):
        check_groups(config, 64 << 20, stores_parts=True)


def test_an_old_nats_server_stores_no_groups_in_parts() -> None:
    small, large = JobConfig.parse(job(8, 64)), JobConfig.parse(job(16, 131_072))
    check_groups(small, 0, stores_parts=False)
    check_groups(large, 0, stores_parts=True)
    with pytest.raises(ConfigError, match=r"above 1048576 it is stored in parts, .* use version 2\.12\.1 or newer"):
        check_groups(large, 0, stores_parts=False)


def evaluation(samples: int, tokens: int, **model: Any) -> dict[str, Any]:
    shared = {key: value for key, value in job(1, tokens).items() if key in ("name", "reward", "sampling", "limits")}
    return {
        **shared,
        "kind": "evaluation",
        "model": {"path": "/models/some", **model},
        "data": {"eval": {"type": "addition"}},
        "evaluation": {"num_prompts": 1, "samples": samples},
    }


def test_groups_of_evaluations_are_limited_too_and_count_router_tables() -> None:
    assert EvaluationJob.parse(evaluation(8, 32_768)).max_group_bytes <= 64 << 20
    with pytest.raises(ConfigError, match=r"more than a group may have \(67108864\).* lower evaluation.samples"):
        EvaluationJob.parse(evaluation(128, 32_768))
    with pytest.raises(ConfigError, match="more than a group may have"):
        EvaluationJob.parse(evaluation(8, 32_768, moe={"router_replay": True, "replay_bytes_per_token": 4096}))
