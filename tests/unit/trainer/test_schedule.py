"""The learning rate at chosen updates of each schedule."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.trainer.schedule import learning_rate
from penstock.shared.config.optimizer import OptimizerConfig
from penstock.shared.errors import ConfigError


def rate(update: int, total: int | None = 100, **config: Any) -> float:
    return learning_rate(OptimizerConfig(learning_rate=1.0, **config), update, total)


def test_warmup_moves_from_the_first_update_and_ends_at_the_peak() -> None:
    assert [rate(i, warmup_updates=4) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_constant_needs_no_length() -> None:
    assert rate(12_345, total=None) == 1.0


@pytest.mark.parametrize(
    ("schedule", "at"),
    [("linear", {20: 1.0, 60: 0.55, 100: 0.1, 500: 0.1}), ("cosine", {20: 1.0, 60: 0.55, 40: 0.868198, 100: 0.1})],
)
def test_decay(schedule: str, at: dict[int, float]) -> None:
    config = {"schedule": schedule, "warmup_updates": 20, "min_lr_ratio": 0.1}
    assert {i: rate(i, **config) for i in at} == pytest.approx(at, abs=1e-6)


def test_a_run_of_unknown_length_cannot_decay() -> None:
    with pytest.raises(ConfigError, match=r"train\.max_updates"):
        rate(0, total=None, schedule="cosine")
