"""Feedback under SIGKILL: each acknowledged item is on disk exactly once, whichever process dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.local.ingest_rates import Front, kill_test


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_nothing_acknowledged_is_lost_or_twice(tmp_path: Path) -> None:
    with Front(tmp_path) as front:
        losses = kill_test(front, connections=16, kills=2)
    assert losses.kills == ["coordinator", "nats"]
    assert losses.acked >= 1000
    assert (losses.lost, losses.repeated) == (0, 0)
