"""Many jobs: lists and submissions cost the same with thousands of jobs as with few, and lists are up to date."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.services.coordinator.jobs.job_index import JobIndex
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.services import Services, build_services
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.jobs import PHASES, TERMINAL_PHASES, JobRecord, JobStatus
from penstock.shared.transport.bus import Bus, Outgoing

JOB: dict[str, Any] = {
    "name": "many",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 1},
    "limits": {"byte_budget": 8 << 20},  # so that all of them have room at once
}
EVERYTHING: dict[str, Any] = {"phase": None, "name": None, "kind": None, "labels": {}, "models": None}


async def store_jobs(bus: Bus, count: int, *, phases: tuple[Any, ...] = ("succeeded",)) -> list[JobRecord]:
    """Write records of ``count`` jobs straight to the bucket, and return them."""
    chance = random.Random(count)
    records = []
    for number in range(count):
        phase = chance.choice(phases)
        spec = JOB | {"name": f"job-{number % 7}", "metadata": {"team": "ab"[number % 2]}}
        spec |= {"kind": "evaluation"} if number % 5 == 0 else {}
        records.append(
            JobRecord(
                id=new_job_id(), name=spec["name"], created_at=datetime.now(UTC), spec=spec,
                status=JobStatus(phase=phase, draws={"drawn": 10, "trained": 10}),
            )
        )  # fmt: skip
    for start in range(0, count, 500):
        some = records[start : start + 500]
        await bus.publish_many([Outgoing(f"$KV.{subjects.JOBS}.{r.id}", r.stored()) for r in some], deadline_s=60)
    return records


def services_of(bus: Bus, folder: Path) -> Services:
    return build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=folder))


async def page(services: Services, **wanted: Any) -> list[JobRecord]:
    """Return the records of one page, as the API's list of jobs does."""
    return [entry.record() for entry in (await services.jobs.index()).page(**wanted)]


async def test_a_page_of_two_thousand_jobs_costs_what_a_page_of_few_does(bus: Bus, tmp_path: Path) -> None:
    await store_jobs(bus, 2000)
    services = services_of(bus, tmp_path)
    await page(services, after=None, limit=20, order="desc", **EVERYTHING)
    took = []
    for _ in range(10):
        began = time.process_time()
        assert len(await page(services, after=None, limit=20, order="desc", **EVERYTHING)) == 20
        took.append(time.process_time() - began)
    assert min(took) < 0.03  # seconds of this process; reading every record took 0.3 and more

    began = time.process_time()
    record = await services.submissions.submit(parse_job(JOB), JOB)
    assert time.process_time() - began < 0.2
    (first,) = await page(services, after=None, limit=1, order="desc", **EVERYTHING)
    assert first.id == record.id


async def test_filtered_pages_match_a_filter_over_all_records(bus: Bus, tmp_path: Path) -> None:
    records = await store_jobs(bus, 120, phases=PHASES)
    services = services_of(bus, tmp_path)
    chance = random.Random(3)
    for _ in range(150):
        phase, name = chance.choice([None, *PHASES]), chance.choice([None, "job-3", "job-5", "nobody"])
        kind, labels = chance.choice([None, "rl", "evaluation"]), chance.choice([{}, {"team": "a"}, {"team": "c"}])
        models = chance.choice([None, frozenset({"job-3", records[8].id}), frozenset({"gone"})])
        order, after = chance.choice(["asc", "desc"]), chance.choice([None, chance.choice(records).id, new_job_id()])
        wanted = [
            r for r in sorted(records, key=lambda r: r.id, reverse=order == "desc")
            if (after is None or (r.id > after if order == "asc" else r.id < after))
            and phase in (None, r.status.phase) and name in (None, r.name) and kind in (None, r.spec.get("kind", "rl"))
            and labels.items() <= r.spec["metadata"].items()
            and (models is None or r.name in models or r.id in models)
        ]  # fmt: skip
        found = await page(
            services, after=after, limit=9, order=order, phase=phase, name=name, kind=kind, labels=labels, models=models
        )
        assert [record.id for record in found] == [record.id for record in wanted[:9]]
    unfinished = [r.id for r in records if r.status.phase not in TERMINAL_PHASES]
    assert [entry.id for entry in (await services.jobs.index()).unfinished()] == unfinished


async def test_an_index_includes_earlier_changes_of_other_replicas(bus: Bus, tmp_path: Path) -> None:
    here, there = services_of(bus, tmp_path), services_of(bus, tmp_path)
    jobs = [await there.submissions.submit(parse_job(JOB), JOB) for _ in range(3)]
    chance = random.Random(5)
    kept = {job.id: job.status.phase for job in jobs}
    for _ in range(30):
        job = chance.choice(sorted(kept))
        if len(kept) > 1 and chance.random() < 0.1:
            await there.jobs.delete(job)
            del kept[job]
        else:
            kept[job] = chance.choice(PHASES)
            await there.jobs.set_status(job, phase=kept[job])
        found = await page(here, after=None, limit=100, order="asc", **EVERYTHING)
        assert {record.id: record.status.phase for record in found} == kept
        for phase in PHASES:
            found = await page(here, after=None, limit=100, order="asc", **{**EVERYTHING, "phase": phase})
            assert {record.id for record in found} == {job for job, known in kept.items() if known == phase}


async def test_concurrent_requests_read_each_change_once(bus: Bus, tmp_path: Path, monkeypatch: Any) -> None:
    await store_jobs(bus, 50)
    services, taken, take = services_of(bus, tmp_path), [], JobIndex.take
    await services.jobs.index()
    monkeypatch.setattr(JobIndex, "take", lambda self, entry: (taken.append(entry.revision), take(self, entry))[1])
    await asyncio.gather(*(services.submissions.submit(parse_job(JOB), JOB) for _ in range(20)))
    found = await page(services, after=None, limit=100, order="asc", **EVERYTHING)
    assert len(found) == 70
    assert sorted(taken) == sorted(set(taken))


async def test_an_undecodable_record_is_left_out_and_hides_no_job(bus: Bus, tmp_path: Path) -> None:
    services = services_of(bus, tmp_path)
    record = await services.submissions.submit(parse_job(JOB), JOB)
    await bus.kv(subjects.JOBS).put(new_job_id(), b"{}")
    found = await page(services, after=None, limit=100, order="asc", **EVERYTHING)
    assert [job.id for job in found] == [record.id]
