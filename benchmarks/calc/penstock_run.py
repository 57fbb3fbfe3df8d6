"""The RL arm: the job through the services on this machine."""

from __future__ import annotations

from pathlib import Path

from service_run import run_job

from calc.curve import Curve
from penstock.shared.config.jobs.job import JobConfig

__all__ = ["run_arm"]


def run_arm(name: str, config: JobConfig, data_dir: Path) -> tuple[Curve, Path]:
    """Run to the end; returns the held-out curve since version 0 and the checkpoint of version 0.

    Raises:
        SystemExit: the job did not succeed, or its audit failed.
    """
    finished = run_job(config, data_dir)
    began = next(event["time"] for event in finished.events if event["type"] == "checkpoint")
    curve = Curve(name)
    for step, wall, value in finished.series("eval/greedy"):
        curve.add(max(0.0, wall - began) if step else 0.0, step, value)
    first = next((data_dir / "checkpoints" / finished.job).glob("00000000-*"))
    return curve, first
