"""The task as a job of Penstock: the five services on this machine, submitted and watched over REST.

    python -m grpo.penstock_run WORKLOAD MODEL ROWS RESULT --steps 100 --max-lag 1 [--goal 0.9] [--seed 0]
        [--rollout-threads 1] [--trainer-threads 1] [--data-dir DIRECTORY] [--env NAME=VALUE ...]

Beside the steps, the result holds an account of the trainer's time (it adds up to the wall time) and the CPU seconds of
every process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from grpo import task
from grpo.bare_run import job
from grpo.cpu_meter import CpuMeter
from penstock.local import Stack, StackOptions

__all__ = ["account"]

READY_S, POLL_S = 120.0, 1.0
STAGES = ("wait", "fetch", "update", "publish", "checkpoint")
WARM_UP = 10
BENCHMARKS = str(Path(__file__).resolve().parent.parent)
"""The reward service imports grpo.task from here."""


async def run(args: argparse.Namespace, data_dir: Path) -> task.Run:
    """Start the services, run the job, collect what it left."""
    workload = task.WORKLOADS[args.workload]
    placement = {"rollout_threads": args.rollout_threads, "trainer_threads": args.trainer_threads}
    sections: dict[str, Any] = {"train": {"max_lag": args.max_lag}, "placement": placement}
    if args.goal:
        sections["early_stop"] = {"metric": "reward/mean", "window": 10, "goal": args.goal}
    spec = job(workload, args.model, args.rows, seed=args.seed, updates=args.steps, **sections)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [BENCHMARKS, os.environ.get("PYTHONPATH")]))}
    environment |= dict(pair.split("=", 1) for pair in args.env)
    async with Stack(StackOptions(data_dir=data_dir, environment=environment)) as stack:
        await stack.ready(deadline_s=READY_S)
        meter = CpuMeter(lambda: {**stack.processes, "(this script)": os.getpid()})
        metering = asyncio.create_task(meter.run())
        async with httpx.AsyncClient(base_url=stack.url, headers={"X-API-Key": stack.api_key}, timeout=30.0) as http:
            submitted = time.time()
            name = await _until_done(http, spec)
            await asyncio.sleep(0.3)  # one more sample of the meter
            metering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await metering
            return await _collect(http, name, submitted, meter, args)


async def _until_done(http: httpx.AsyncClient, spec: dict[str, Any]) -> str:
    reply = await http.post("/v1/jobs", json=spec)
    if reply.is_error:
        raise SystemExit(f"the job was refused: {reply.text}")
    name = str(reply.json()["id"])
    while True:
        await asyncio.sleep(POLL_S)
        status = (await http.get(f"/v1/jobs/{name}")).raise_for_status().json()["status"]
        if status["phase"] == "succeeded":
            return name
        if status["phase"] in ("failed", "cancelled"):
            raise SystemExit(f"the job {status['phase']}: {status['message']}")


async def _collect(
    http: httpx.AsyncClient, name: str, submitted: float, meter: CpuMeter, args: argparse.Namespace
) -> task.Run:
    metrics = (await http.get(f"/v1/jobs/{name}/metrics", params={"max_points": 10_000})).raise_for_status().json()
    audit = (await http.get(f"/v1/jobs/{name}/audit")).raise_for_status().json()
    events = (await http.get(f"/v1/jobs/{name}/events")).raise_for_status().json()["data"]
    start = next(event["time"] for event in events if event["type"] == "checkpoint")  # version 0 exists
    series, walls = metrics["series"], metrics["wall"]
    steps = [
        task.Step(wall, reward, tokens, sum(meter.at(wall).values()))
        for wall, reward, tokens in zip(walls, series["reward/mean"], series["tokens/scored"], strict=True)
    ]
    facts = {
        "max_lag": args.max_lag,
        "threads": {"rollout": args.rollout_threads, "trainer": args.trainer_threads},
        "account": account(walls, series, meter) if len(walls) > WARM_UP + 1 else {},
        "audit": {key: audit[key] for key in ("ok", "drawn", "trained", "dropped", "in_flight") if key in audit},
        "lag": max(series["lag/max"]),
        "forward_share": sum(series["tokens/forward"]) / sum(series["tokens/scored"]),
        "mismatch": sum(series["mismatch/logprob"]) / len(walls) if "mismatch/logprob" in series else None,
    }
    return task.Run(f"penstock lag {args.max_lag}", start, start - submitted, steps, facts)


def account(walls: list[float], series: dict[str, list[float]], meter: CpuMeter) -> dict[str, dict[str, float]]:
    """Seconds per step between the end of step WARM_UP and the last one: of the trainer by stage, and CPU by process.

    ``rest`` is what no stage measured, so the stages add up to ``wall``.
    """
    first, last, number = WARM_UP, len(walls) - 1, len(walls) - 1 - WARM_UP
    wall = (walls[last] - walls[first]) / number
    trainer = {stage: sum(series[f"seconds/{stage}"][first + 1 : last + 1]) / number for stage in STAGES}
    trainer["rest"] = wall - sum(trainer.values())
    used, before = meter.at(walls[last]), meter.at(walls[first])
    update = {
        name.removeprefix("update_s/"): sum(values[first + 1 :]) / number
        for name, values in series.items()
        if name.startswith("update_s/")
    }
    cpu = {name: (seconds - before[name]) / number for name, seconds in used.items() if name in before}
    return {"wall": {"wall": wall}, "trainer": trainer, "update": update, "cpu": cpu}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=task.WORKLOADS)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max-lag", type=int, required=True)
    parser.add_argument("--goal", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollout-threads", type=int, default=1)
    parser.add_argument("--trainer-threads", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, help="default: a temporary directory")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the services")
    args = parser.parse_args()
    args.model, args.rows = str(Path(args.model).resolve()), args.rows.resolve()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        result = asyncio.run(run(args, args.data_dir or Path(scratch)))
    task.write_run(args.result, result)


if __name__ == "__main__":
    main()
