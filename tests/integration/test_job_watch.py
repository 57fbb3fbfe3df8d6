"""A worker opens, amends and closes sessions as the job records change."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import pytest

from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import Fenced, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import JobRecord, JobStatus
from penstock.shared.runtime.jobs import Breaks, watch_jobs
from penstock.shared.transport.bus import Bus

T = TypeVar("T")

SPEC = {
    "name": "addition",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 4},
    "train": {"batch_size": 8, "max_updates": 3},
}


async def store(bus: Bus, job: str, *, temperature: float = 1.0, **status: str) -> None:
    spec = {**SPEC, "sampling": {"temperature": temperature}}
    record = JobRecord(id=job, name=job, created_at=datetime.now(UTC), spec=spec, status=JobStatus(**status))
    await bus.kv(subjects.JOBS).put(job, record.model_dump_json().encode())


@pytest.mark.long
async def test_sessions_come_and_go_with_their_jobs(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    opened: Counter[str] = Counter()
    closed: set[str] = set()

    async def session(job: str, config: JobConfig) -> None:
        assert config.name == "addition"
        opened[job] += 1
        if job == "job_breaks" and opened[job] == 1:
            raise ValueError("a bug in a session")
        try:
            await asyncio.Event().wait()
        finally:
            closed.add(job)

    await store(bus, "job_old", phase="succeeded")
    await store(bus, "job_runs")
    await bus.kv(subjects.JOBS).put("job_broken_record", b"{}")
    watching = asyncio.create_task(watch_jobs(bus, session))
    await store(bus, "job_breaks")
    for _ in range(200):
        if opened == {"job_runs": 1, "job_breaks": 2}:
            break
        await asyncio.sleep(0.02)
    assert opened == {"job_runs": 1, "job_breaks": 2}
    assert "a bug in a session" in caplog.text
    assert "job_broken_record" in caplog.text
    await store(bus, "job_runs", phase="running")
    await store(bus, "job_breaks", phase="cancelled")
    await asyncio.sleep(0.1)
    assert not watching.done(), watching.exception()
    assert closed == {"job_breaks"}
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert closed == {"job_breaks", "job_runs"}
    assert opened["job_runs"] == 1
    caplog.set_level(logging.CRITICAL)


@pytest.mark.long
async def test_a_sessions_failure_is_reported_until_a_later_session_lasts_longer(bus: Bus) -> None:
    breaks, works, num_opened = Breaks(), asyncio.Event(), 0

    async def session(job: str, config: JobConfig) -> None:
        nonlocal num_opened
        num_opened += 1
        if works.is_set():
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    async def fail() -> None:
        await asyncio.sleep(0.1)
        raise Unavailable("no room in /dev/shm")

    def reported() -> dict[str, object]:
        return breaks.add_to({"job_other": {"version": 3}}).get("job_breaks", {})

    async def until(condition: Callable[[], T]) -> T:
        async with asyncio.timeout(30):
            while not (found := condition()):
                await asyncio.sleep(0.01)
        return found

    watching = asyncio.create_task(watch_jobs(bus, session, breaks=breaks))
    await store(bus, "job_breaks")
    first = await until(reported)
    assert first["problem"] == "no room in /dev/shm"
    again = await until(lambda: num_opened >= 3 and reported())  # on a busy machine a reason may end earlier
    assert again == first, "the reported time is that of the first failure"
    works.set()
    await until(lambda: not reported())
    assert breaks.add_to({"job_other": {"version": 3}}) == {"job_other": {"version": 3}}
    works.clear()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_a_changed_job_file_reaches_the_running_and_the_next_session(bus: Bus) -> None:
    amended: list[float] = []
    opened: list[float] = []
    breaks = asyncio.Event()

    async def session(job: str, config: JobConfig) -> None:
        opened.append(config.sampling.temperature)
        await breaks.wait()
        breaks.clear()
        raise ValueError("a bug in a session")

    async def until(found: list[float], expected: list[float]) -> None:
        async with asyncio.timeout(30):
            while found != expected:
                await asyncio.sleep(0.01)

    await store(bus, "job_1")
    watching = asyncio.create_task(
        watch_jobs(bus, session, amend=lambda job, config: amended.append(config.sampling.temperature))
    )
    await until(opened, [1.0])
    await store(bus, "job_1", phase="running")  # no change of the file
    await store(bus, "job_1", temperature=0.5)
    await until(amended, [0.5])
    breaks.set()
    await until(opened, [1.0, 0.5])
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.long
async def test_objects_of_a_failed_session_are_freed(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """The models of the broken session would occupy memory that the next session needs."""
    caplog.set_level(logging.CRITICAL, "penstock.shared.runtime.jobs")  # a record would hold the traceback

    class Model:
        pass

    alive: list[weakref.ref[Model]] = []
    second = asyncio.Event()

    async def session(job: str, config: JobConfig) -> None:
        if alive:
            second.set()
            await asyncio.Event().wait()
        model = Model()
        alive.append(weakref.ref(model))
        raise ValueError("a bug in a session")

    await store(bus, "job_breaks")
    watching = asyncio.create_task(watch_jobs(bus, session))
    async with asyncio.timeout(30):
        await second.wait()
    gc.collect()
    assert alive[0]() is None
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_objects_of_an_ended_session_are_freed(bus: Bus) -> None:
    """Models contain reference cycles, which the garbage collector might free only many jobs later."""

    class Model:
        def __init__(self) -> None:
            self.itself = self

    alive: list[weakref.ref[Model]] = []

    async def session(job: str, config: JobConfig) -> None:
        model = Model()
        alive.append(weakref.ref(model))
        await asyncio.Event().wait()

    await store(bus, "job_ends")
    gc.disable()
    watching = asyncio.create_task(watch_jobs(bus, session))
    try:
        async with asyncio.timeout(60):
            while not alive:
                await asyncio.sleep(0.01)
            await store(bus, "job_ends", phase="succeeded")
            while alive[0]() is not None:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_session_that_fails_while_its_job_ends_is_closed(bus: Bus) -> None:
    """A failing task group drops a cancellation from outside (until Python 3.13)."""
    opened: list[str] = []
    ended: list[str] = []
    failing = asyncio.Event()

    async def fail() -> None:
        failing.set()
        raise Fenced("somebody else writes")

    async def close_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)

    async def session(job: str, config: JobConfig) -> None:
        opened.append(job)
        if opened == ["job_ends"]:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(close_slowly())
                await asyncio.sleep(0)
                tasks.create_task(fail())
        await asyncio.Event().wait()

    await store(bus, "job_old", phase="failed")
    await store(bus, "job_ends")
    watching = asyncio.create_task(watch_jobs(bus, session, on_end=ended.append))
    async with asyncio.timeout(5):
        await failing.wait()
        await store(bus, "job_ends", phase="cancelled")
        await store(bus, "job_next")
        while opened != ["job_ends", "job_next"]:
            await asyncio.sleep(0.02)
    assert ended == ["job_old", "job_ends"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_evaluations_go_to_the_services_that_have_a_part_in_them(bus: Bus) -> None:
    spec = {key: SPEC[key] for key in ("name", "model", "reward")}
    spec |= {"kind": "evaluation", "data": {"eval": {"type": "addition"}}}
    record = JobRecord(id="job_evaluation", name="e", created_at=datetime.now(UTC), spec=spec, status=JobStatus())
    opened: dict[str, set[str]] = {"training": set(), "evaluation": set()}

    async def training(job: str, config: JobConfig) -> None:
        opened["training"].add(job)

    async def evaluation(job: str, config: EvaluationJob) -> None:
        opened["evaluation"].add(f"{job} {config.kind}")

    async def only_training(job: str, config: JobConfig) -> None:
        assert job != "job_evaluation"

    watching = [
        asyncio.create_task(watch_jobs(bus, training, open_evaluation=evaluation)),
        asyncio.create_task(watch_jobs(bus, only_training)),
    ]
    await bus.kv(subjects.JOBS).put("job_evaluation", record.model_dump_json().encode())
    await store(bus, "job_runs")
    async with asyncio.timeout(30):
        while not (opened["training"] and opened["evaluation"]):
            await asyncio.sleep(0.02)
    assert opened == {"training": {"job_runs"}, "evaluation": {"job_evaluation evaluation"}}
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def test_a_session_that_ends_with_its_job_is_waited_for_and_not_cancelled_twice(bus: Bus) -> None:
    running, ending, cleaned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def session(job: str, config: JobConfig) -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.sleep(0.2)
            cleaned.set()

    await store(bus, "job_runs")
    watching = asyncio.create_task(watch_jobs(bus, session))
    async with asyncio.timeout(30):
        await running.wait()
        await store(bus, "job_runs", phase="succeeded")
        await ending.wait()
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    assert cleaned.is_set()
