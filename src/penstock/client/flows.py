"""Client methods that need several requests, as generators of calls that both clients perform."""

from __future__ import annotations

import math
import time
from typing import Any, TypeVar

from penstock.client import calls
from penstock.client.calls import Goal, JobFile, Records, Row, Rows
from penstock.client.files import upload_beside
from penstock.client.patience import Patience, Search
from penstock.client.results.reading import many
from penstock.client.sending import Pause, Steps
from penstock.shared.errors import DeadlineError, Unavailable
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["checkpoint_now", "dry_run", "find", "pages", "rows", "scale", "submit", "until_done", "wait"]

S = TypeVar("S")

PAGE = 100
HOLD_S = 25.0


def submit(job: JobFile, key: str | None) -> Steps[JobRecord]:
    """Upload the files that a job file names by relative paths, and submit the job."""
    text = yield from upload_beside(calls.text_of(job))
    record: JobRecord = yield calls.submit(text, key)
    return record


def dry_run(job: JobFile) -> Steps[Row]:
    """Upload the files that a job file names by relative paths, and validate the job."""
    text = yield from upload_beside(calls.text_of(job))
    plan: Row = yield calls.dry_run(text)
    return plan


def find(ref: str) -> Steps[JobRecord]:
    """Find a job by id, prefix of an id, or name."""
    search = Search(ref)
    while (call := search.next_call()) is not None:
        search.take((yield call))
    return search.result()


def pages(limit: int, after: str | None, **wanted: Any) -> Steps[Records]:
    """List up to ``limit`` jobs."""
    found: Records = []
    while len(found) < limit:
        size = min(PAGE, limit - len(found))
        got = yield calls.page(after=after, limit=size, **wanted)
        found += got
        if len(got) < size:
            break
        after = got[-1].id
    return found


def rows(kind: type[S], path: str, key: str, limit: int, /, **query: Any) -> Steps[list[S]]:
    """List up to ``limit`` rows; ``key`` is the field that identifies a row."""
    found: Rows = []
    while len(found) < limit:
        after = found[-1][key] if found else None
        page = yield calls.show(path, dict, after=after, limit=min(PAGE, limit - len(found)), **query)
        found += page["data"]
        if not page["has_more"]:
            break
    return many(kind)({"data": found})


def wait(job: str, goal: Goal, timeout_s: float | None, patience_s: float) -> Steps[JobRecord]:
    """Wait until a job ends or reaches ``goal``, and return its record. Raises DeadlineError, Unavailable."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    patience = Patience(patience_s)
    while True:
        left = HOLD_S if deadline is None else min(HOLD_S, deadline - time.monotonic())
        try:
            record: JobRecord = yield calls.hold(job, goal, max(0.0, left))
        except Unavailable as error:
            pause = patience.after(error)
            if deadline is not None:
                pause = min(pause, deadline - time.monotonic())
                if pause <= 0:
                    raise DeadlineError(f"no news of job '{job}' within {timeout_s:g} s: {error}") from error
            yield Pause(pause)
            continue
        patience.renew()
        if calls.reached(record, goal):
            return record
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineError(f"job '{job}' is {record.status.phase} after {timeout_s:g} s, not {goal}")


def checkpoint_now(job: str, timeout_s: float) -> Steps[Row]:
    """Take a checkpoint, wait for it, and return its number and path."""
    asked = yield calls.checkpoint_now(job)
    return (yield from until_done(job, asked, timeout_s, f"no checkpoint of job '{job}'"))


def scale(job: str, pool: str, replicas: int, timeout_s: float) -> Steps[Row]:
    """Set the number of workers of a service and wait until they are ready."""
    asked = yield calls.post(f"/v1/jobs/{job}/scale", {"pool": pool, "replicas": replicas})
    return (yield from until_done(job, asked, timeout_s, f"not {replicas} workers of '{pool}' that are ready"))


def until_done(job: str, asked: Row, timeout_s: float, what: str) -> Steps[Row]:
    """Wait until an operation is done, even while the server is unreachable, and return its result.

    Raises:
        Conflict: the operation failed.
        DeadlineError: the operation is not done after ``timeout_s`` seconds.
    """
    deadline, patience = time.monotonic() + timeout_s, Patience(math.inf)
    problem = ""
    while asked["state"] == "pending":
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"{what} within {timeout_s:g} s{problem}")
        try:
            asked = yield calls.operation(job, asked["id"], min(HOLD_S, left))
        except Unavailable as error:
            problem = f": {error}"
            yield Pause(max(0.0, min(patience.after(error), deadline - time.monotonic())))
        else:
            problem = ""
            patience.renew()
    return calls.result_of(asked)
