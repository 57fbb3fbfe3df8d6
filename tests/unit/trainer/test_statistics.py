"""Statistics of unusual batches."""

from __future__ import annotations

import numpy as np

from penstock.services.trainer.batch.statistics import lag_facts, optimizer_facts
from penstock.shared.protocol.events import SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import BatchManifest


def test_a_group_from_the_future_has_no_lag() -> None:
    """A group may be newer than the trainer after a restart from an older version."""
    groups = [
        SealedGroup(Draw(i, 0), "a", i + 1, "d", version, version, [1.0], 1, "rollout-0")
        for i, version in enumerate([3, 5, 7])
    ]
    metrics = lag_facts(BatchManifest(number=6, revision=1, start_version=5, update_index=5, groups=groups))
    assert (metrics["lag/mean"], metrics["lag/max"]) == (2 / 3, 2)
    assert np.allclose([metrics[f"lag/share_{lag}"] for lag in range(3)], [2 / 3, 0, 1 / 3])


def test_skipped_steps_are_not_counted() -> None:
    assert optimizer_facts("policy", 0.1, [1.0, float("nan"), 3.0]) == {
        "policy/lr": 0.1,
        "policy/steps": 2.0,
        "policy/grad_norm": 2.0,
    }
