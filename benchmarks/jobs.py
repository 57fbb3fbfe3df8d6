"""Pages of `GET /v1/jobs` and submissions per second, with few and with many jobs in the deployment.

    python benchmarks/jobs.py [--out results.json] [--jobs 10000] [--pages 200] [--submissions 200]

nats-server (every message synced to disk) and the coordinator are processes of their own; requests come over HTTP. The
jobs that fill the bucket are over; those that are submitted are led, and wait for workers that are not there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import uvloop
from report import Report

from penstock.local.ingest_rates import Front
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.jobs import JobRecord, JobStatus
from penstock.shared.transport.bus import Bus, Outgoing

FEW = 5
CONNECTIONS = 8
PAGE_MS, SUBMISSIONS_PER_S = 50.0, 50.0
JOB: dict[str, Any] = {
    "name": "bench",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "sampling": {"max_new_tokens": 4},
    "algorithm": {"group_size": 2},
    "train": {"batch_size": 2, "max_updates": 1},
    "limits": {"byte_budget": 4 << 20},
}
QUERIES = (
    "limit=20",
    "limit=100",
    "limit=20&phase=succeeded&order=asc",
    "limit=20&name=job-3",
    "limit=20&kind=rl&metadata[team]=b",
)


async def fill(url: str, count: int) -> None:
    """Store records of jobs that are over."""
    status = JobStatus(phase="succeeded", draws={"drawn": 10, "trained": 10, "in_flight": 0, "dropped": {}})
    async with await Bus.connect(url, name="bench") as bus:
        for start in range(0, count, 500):
            records = [
                JobRecord(
                    id=new_job_id(), name=f"job-{number % 7}", created_at=datetime.now(UTC), status=status,
                    spec=JOB | {"name": f"job-{number % 7}", "metadata": {"team": "ab"[number % 2]}},
                )
                for number in range(start, min(start + 500, count))
            ]  # fmt: skip
            messages = [Outgoing(f"$KV.{subjects.JOBS}.{record.id}", record.stored()) for record in records]
            await bus.publish_many(messages, deadline_s=60)


async def page_ms(client: httpx.AsyncClient, count: int) -> list[float]:
    """How long pages take, one after another, sorted."""
    took = []
    for number in range(count):
        began = time.perf_counter()
        reply = await client.get(f"/v1/jobs?{QUERIES[number % len(QUERIES)]}")
        took.append((time.perf_counter() - began) * 1e3)
        reply.raise_for_status()
    return sorted(took)


async def submissions_per_s(client: httpx.AsyncClient, count: int) -> float:
    """Submissions over some connections."""
    left = iter(range(count))

    async def submit() -> None:
        for _ in left:
            (await client.post("/v1/jobs", json=JOB)).raise_for_status()

    began = time.perf_counter()
    await asyncio.gather(*(submit() for _ in range(CONNECTIONS)))
    return count / (time.perf_counter() - began)


async def measure(front: Front, arguments: argparse.Namespace) -> dict[str, float]:
    """Pages, then submissions, then the walk over all pages that `penstock ls` makes."""
    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(base_url=front.url, timeout=60, limits=limits) as client:
        began = time.perf_counter()
        (await client.get("/v1/jobs")).raise_for_status()
        first = (time.perf_counter() - began) * 1e3
        took = await page_ms(client, arguments.pages)
        began, after, seen = time.perf_counter(), "", 0
        while seen < 2000:
            page = (await client.get(f"/v1/jobs?limit=100{after}")).raise_for_status().json()
            seen += len(page["data"])
            after = f"&after={page['last_id']}"
            if not page["has_more"]:
                break
        walked = time.perf_counter() - began
        rate = await submissions_per_s(client, arguments.submissions)
    p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
    return {"first_ms": first, "p50_ms": p50, "p99_ms": p99, "ls_2000_s": walked, "submissions_per_s": rate}


def main(arguments: argparse.Namespace) -> int:
    report = Report("Many jobs", ["jobs", "first page ms", "page p50 ms", "p99 ms", "ls 2000 s", "submissions/s"])
    for count in (FEW, arguments.jobs):
        with (
            tempfile.TemporaryDirectory() as directory,
            Front(Path(directory)) as front,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(fill(front.nats.url, count))
            found = runner.run(measure(front, arguments))
        report.row(str(count), *(f"{found[name]:.1f}" for name in found))
        report.results[str(count)] = found
    report.check(f"p99 of a page at most {PAGE_MS:g} ms", found["p99_ms"] <= PAGE_MS)
    report.check(f"at least {SUBMISSIONS_PER_S:g} submissions/s", found["submissions_per_s"] >= SUBMISSIONS_PER_S)
    return report.finish(arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--submissions", type=int, default=200)
    sys.exit(main(parser.parse_args()))
