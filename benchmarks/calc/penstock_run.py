"""The RL arm: the job through the services on this machine, watched over REST."""

from __future__ import annotations

import asyncio
from pathlib import Path

from calc.curve import Curve
from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.job import JobConfig

__all__ = ["run_job"]

READY_S, JOB_S = 120.0, 3600.0


def run_job(config: JobConfig, data_dir: Path) -> tuple[Curve, Path]:
    """Run to the end; returns the held-out curve since version 0 and the checkpoint of version 0.

    Raises:
        SystemExit: the job did not succeed, or its books do not hold.
    """
    return asyncio.run(_run(config, data_dir))


async def _run(config: JobConfig, data_dir: Path) -> tuple[Curve, Path]:
    async with Stack(StackOptions(data_dir=data_dir, environment={"PENSTOCK_API_KEYS": ""})) as stack:
        await stack.ready(deadline_s=READY_S)
        async with AsyncClient(stack.url) as client:
            job = (await client.submit(config)).id
            record = await client.wait(job, timeout_s=JOB_S)
            audit = await client.audit(job)
            if record.status.phase != "succeeded" or not audit["ok"]:
                raise SystemExit(f"the job {record.status.phase}: {record.status.message}; books hold: {audit['ok']}")
            metrics = await client.metrics(job, max_points=10_000)
            events = [event async for event in client.events(job, follow=False)]
    began = next(event["time"] for event in events if event["type"] == "checkpoint")
    curve = Curve("RL (GRPO)")
    for step, wall, value in zip(metrics["steps"], metrics["wall"], metrics["series"]["eval/greedy"], strict=True):
        if value is not None:
            curve.add(max(0.0, wall - began) if step else 0.0, step, value)
    first = next((data_dir / "checkpoints" / job).glob("00000000-*"))
    return curve, first
