"""Durable feedback per second through HTTP beside a handler that stores each item by itself, all in one run.

    python benchmarks/ingest.py [--out results.json] [--seconds 10] [--batch-seconds 60] [--connections 64]
        [--batch 256] [--kills 4]

nats-server (every message synced to disk before its acknowledgement), the coordinator and the load are processes of
their own on this machine. The load is wrk where it is installed, else Python sockets in a process of their own; the
table says which. The naive handler is the same application without group commit: one message for each item.

At the end coordinator and nats-server are killed (SIGKILL) under load of single items, then of batches, in turn, and
every item that was acknowledged is looked for in the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import uvloop
from report import Report

from penstock.local.ingest_rates import Front, kill_test, load_name, measure
from penstock.local.load import Plan, Result
from penstock.local.ports import free_ports
from penstock.shared.errors import PenstockError

READY_S = 60.0
SINGLE_PER_S, BATCHED_PER_S = 1000, 4000


async def serve_naively(nats_url: str, port: int, data_dir: Path) -> None:
    """The application over a store that publishes one message for each item and waits for it."""
    import uvicorn

    from penstock.services.coordinator.api import create_app
    from penstock.services.coordinator.feedback import service
    from penstock.services.coordinator.feedback.ingest import Ingest, Stored
    from penstock.services.coordinator.jobs.members import Members
    from penstock.services.coordinator.jobs.store import JobStore
    from penstock.services.coordinator.services import build_services
    from penstock.shared.config.service import ServiceSettings
    from penstock.shared.protocol import subjects
    from penstock.shared.protocol.codec import pack
    from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch
    from penstock.shared.transport.bus import Bus

    class Naive(Ingest):
        async def add(self, items: Sequence[tuple[Feedback, bool]]) -> list[Stored | PenstockError]:
            """One message for each item."""
            stored: list[Stored | PenstockError] = []
            for item, _ in items:
                data = pack(FeedbackBatch(items=[item]), job=item.job)
                stored.append(Stored(item.id, await self._bus.publish(subjects.feedback(item.job), data)))
            return stored

    service.Ingest = Naive  # type: ignore[attr-defined]
    async with await Bus.connect(nats_url, name="naive") as bus:
        settings = ServiceSettings(
            data_dir=data_dir,
            live_rate_limit="100000000/minute",
            api_keys="",
            open_loopback=True,
            redis_url=None,
        )
        store = JobStore(bus)
        feedback = service.FeedbackService(bus, store, data_dir)
        app = create_app(build_services(bus, store, Members(), {}, settings), feedback_service=feedback)
        running = asyncio.create_task(feedback.run())
        await uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", access_log=False)).serve()
        running.cancel()


@contextmanager
def naive(front: Front, plan: Plan) -> Iterator[Plan]:
    """The naive handler beside ``front``, on the same nats-server; ``plan`` turned to it."""
    port = free_ports(1)[0]
    command = [sys.executable, __file__, "--serve-naively", front.nats.url, str(port), str(front.directory / "naive")]
    process = subprocess.Popen(command, env={**os.environ, "PENSTOCK_API_KEYS": ""})
    try:
        for _ in range(int(READY_S / 0.05)):
            try:
                if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).is_success:
                    break
            except httpx.TransportError:
                pass
            asyncio.run(asyncio.sleep(0.05))
        yield msgspec.structs.replace(plan, port=port)
    finally:
        process.kill()
        process.wait()


def cells(result: Result) -> list[str]:
    """A result as a row."""
    errors = result.errors + sum(count for status, count in result.statuses.items() if status[0] not in "2")
    return [f"{result.items_per_s:,.0f}", f"{result.p50_ms:.1f}", f"{result.p99_ms:.1f}", str(errors)]


def main(arguments: argparse.Namespace) -> int:
    report = Report(f"Feedback ingest; load: {load_name()}", ["posts", "items/s", "p50 ms", "p99 ms", "errors"])
    shape = {"connections": arguments.connections}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory, Front(Path(directory)) as front:
        plans = {
            "single": front.plan(batch=0, seconds=arguments.seconds, **shape),
            "batch": front.plan(batch=arguments.batch, seconds=arguments.batch_seconds, **shape),
        }
        results = {name: measure(plan) for name, plan in plans.items()}
        sizes = {"single": 0, "batch": arguments.batch}
        losses = {name: kill_test(front, kills=arguments.kills, batch=size, **shape) for name, size in sizes.items()}
        front.kill()  # the naive handler gets the same cores
        for name, plan in plans.items():
            with naive(front, plan) as turned:
                results[f"naive {name}"] = measure(turned)
    for name, result in results.items():
        report.row(name.replace("batch", f"batches of {arguments.batch}"), *cells(result))
    report.check(f"single items: at least {SINGLE_PER_S:,}/s", results["single"].items_per_s >= SINGLE_PER_S)
    report.check(f"in batches: at least {BATCHED_PER_S:,}/s", results["batch"].items_per_s >= BATCHED_PER_S)
    for name, found in losses.items():
        killed = f"{name}: {found.acked:,} acknowledged across {len(found.kills)} kills"
        report.check(f"{killed}: none lost, none twice", found.lost == found.repeated == 0)
    refused = results["batch"].statuses.get("other", 0) + results["batch"].errors
    report.check(f"in batches: no request refused or broken off ({refused})", not refused)
    report.results = {
        "load": load_name(), "rates": msgspec.to_builtins(results), "kills": msgspec.to_builtins(losses),
    }  # fmt: skip
    return report.finish(arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--batch-seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--serve-naively", nargs=3, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.serve_naively:
        url, number, folder = found.serve_naively
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_naively(url, int(number), Path(folder)))
        sys.exit(0)
    sys.exit(main(found))
