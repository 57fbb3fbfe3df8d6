"""The finished job whose groups are deleted first, and jobs that are refused for lack of room."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.services.coordinator.jobs.job_index import JobEntry, entry_of
from penstock.services.coordinator.jobs.retention import check_room, oldest_finished, without_interactions
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import JobRecord, JobStatus, Phase


def entry(job: str, phase: Phase, budget: int = 100, kind: str = "rl") -> JobEntry:
    spec = {"kind": kind, "limits": {"byte_budget": budget}}
    record = JobRecord(id=job, name="x", created_at=datetime.now(UTC), spec=spec, status=JobStatus(phase=phase))
    return entry_of(job, record.stored(), 1)


def test_the_oldest_finished_job_with_groups_goes_first() -> None:
    jobs = [entry("job_3", "failed"), entry("job_1", "succeeded"), entry("job_0", "running")]
    assert oldest_finished(jobs, {"experience.job_0": 9, "experience.job_1": 2, "experience.job_3": 1}) == "job_1"
    assert oldest_finished(jobs, {"experience.job_0": 9, "experience.job_3": 1}) == "job_3"
    assert oldest_finished(jobs, {"experience.job_0": 9}) is None


def test_budgets_of_running_jobs_are_reserved() -> None:
    jobs = [entry("job_1", "running", 600), entry("job_2", "succeeded", 5000)]
    check_room(jobs, 400, experience_bytes=1000)
    with pytest.raises(ConfigError, match="401 bytes beside the 600 of 1 running jobs"):
        check_room(jobs, 401, experience_bytes=1000)


def test_jobs_that_learn_give_up_their_interactions_last() -> None:
    jobs = [entry("job_1", "running", kind="online_rl"), entry("job_2", "running"), entry("job_3", "succeeded")]
    assert without_interactions(jobs) == ["job_3", "job_2"]
