"""Scorers that are declared slow: groups wait in the stream RAW, and survive the death of the reward worker."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.protocol import subjects

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.long
def test_slow_scorers_work_from_a_stream(stack: Any) -> None:
    total = 150  # more updates than the job makes between two polls
    job = stack.submit(f"train.max_updates={total}", "reward.slow=true", "reward.processes=2")
    assert stack.reach(job, 5) < total
    stack.kill("reward-0")
    assert stack.finish(job).status.step == total
    raw = stack.on_bus(lambda bus: bus.stream_state(subjects.RAW))
    assert raw.last_seq >= total * 4, "every group went through RAW"
    stack.until(lambda: not stack.on_bus(lambda bus: bus.subject_counts(subjects.RAW)), "RAW is empty", 10)
    stack.check_audit(job)
