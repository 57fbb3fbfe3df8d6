"""One job through the real services on this machine, watched over REST."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.jobs.kinds import AnyTraining

__all__ = ["Finished", "run_job"]

READY_S, JOB_S = 400.0, 3600.0  # an interpreter of its own imports its own torch


@dataclass(frozen=True)
class Finished:
    """A succeeded job. ``metrics`` and ``events`` are those of the REST API."""

    job: str
    metrics: dict[str, Any]
    events: list[dict[str, Any]]

    def series(self, name: str) -> list[tuple[int, float, float]]:
        """``(policy version, wall seconds since the epoch, value)`` where the series has a value."""
        columns = (self.metrics["steps"], self.metrics["wall"], self.metrics["series"].get(name, []))
        return [(step, wall, value) for step, wall, value in zip(*columns, strict=False) if value is not None]


def run_job(config: AnyTraining, data_dir: Path, *, pythons: Mapping[str, Path] | None = None) -> Finished:
    """Start a stack in ``data_dir``, run ``config`` to its end, audit it, stop the stack.

    Args:
        pythons: interpreters of services that have one of their own, by service.

    Raises:
        SystemExit: the job did not succeed, or its audit failed.
    """
    return asyncio.run(_run(config, data_dir, dict(pythons or {})))


async def _run(config: AnyTraining, data_dir: Path, pythons: dict[str, Path]) -> Finished:
    options = StackOptions(data_dir=data_dir, environment={"PENSTOCK_API_KEYS": ""}, pythons=pythons)
    async with Stack(options) as stack:
        await stack.ready(deadline_s=READY_S)
        async with AsyncClient(stack.url, api_key=stack.api_key) as client:
            job = (await client.submit(config)).id
            record = await client.wait(job, timeout_s=JOB_S)
            audit = await client.audit(job)
            if record.status.phase != "succeeded" or not audit["ok"]:
                raise SystemExit(f"the job {record.status.phase}: {record.status.message}; audit passed: {audit['ok']}")
            metrics = await client.metrics(job, max_points=10_000)
            events = [event async for event in client.events(job, follow=False)]
    return Finished(job, metrics, events)
