"""Replicas of the coordinator agree through the bus on the job of a submission, and on the leader of a job."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.leader_rpc import Leader
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.services import Services, build_services
from penstock.services.coordinator.submission import SubmissionIds
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Invalid
from penstock.shared.transport.bus import Bus

SPEC: dict[str, Any] = {"kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"}}


@pytest.fixture
def replica(bus: Bus, tmp_path: Path) -> Any:
    """``replica(runners)`` returns the services of a coordinator that leads the jobs of ``runners``."""

    def make(runners: dict[str, Leader] | None = None) -> Services:
        settings = ServiceSettings(data_dir=tmp_path)
        return build_services(bus, JobStore(bus), Members(), runners or {}, settings)

    return make


async def test_a_submission_is_one_job_on_every_replica(replica: Any) -> None:
    fronts = [replica(), replica()]
    spec = parse_training(SPEC)
    records = await asyncio.gather(*(fronts[n % 2].submissions.submit(spec, SPEC, key="k") for n in range(10)))
    assert len({record.id for record in records}) == 1
    assert len((await fronts[0].jobs.index()).all()) == 1
    with pytest.raises(Invalid) as reused:
        await fronts[1].submissions.submit(spec, {**SPEC, "metadata": {"a": "b"}}, key="k")
    assert reused.value.code == "idempotency_key_reused"


async def test_a_submission_goes_on_after_the_death_of_its_coordinator(bus: Bus, replica: Any) -> None:
    """The first coordinator has settled the job's id, but not stored the job."""
    settled = await SubmissionIds(bus).job_id("k", json.dumps(SPEC).encode())
    for _ in range(2):
        assert (await replica().submissions.submit(parse_training(SPEC), SPEC, key="k")).id == settled


async def test_a_follower_reports_the_same_reasons_as_the_leader(bus: Bus, replica: Any, tmp_path: Path) -> None:
    follower = replica()
    record = await follower.submissions.submit(parse_training(SPEC), SPEC)
    (row,) = await follower.diagnosis.why(record.id)
    assert row["holder"] == "nobody"
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path)
    leader = replica({record.id: runner})
    tasks = [asyncio.create_task(runner.lead()), asyncio.create_task(leader.leader.serve())]
    try:
        async with asyncio.timeout(30):
            while not runner.ready or not (await follower.diagnosis.why(record.id))[0]["waiting_for"].startswith(
                "a live"
            ):
                await asyncio.sleep(0.01)
        mine, theirs = await leader.diagnosis.why(record.id), await follower.diagnosis.why(record.id)
        assert [row["waiting_for"] for row in theirs] == [row["waiting_for"] for row in mine]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
