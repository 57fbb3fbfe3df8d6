"""How large a group may be is decided when a job is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.config.job import JobConfig
from penstock.shared.errors import ConfigError


def job(group_size: int, tokens: int) -> dict[str, Any]:
    return {
        "name": "large",
        "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
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
