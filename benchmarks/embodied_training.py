"""A robot arm by PPO as a job of Penstock, beside one plain process: same machine, same run, same batch and budget.

    python benchmarks/embodied_training.py [--seeds 1 2 3] [--updates 40] [--out docs/results/embodied]

The plain process (reach/plain.py) steps all environments in a loop and trains between. The job goes through five
services and NATS: 16 episodes of 100 steps an update, strictly on-policy, in one session of 16 environments, and in two
sessions of 8 of which one steps while the policy decides for the other. Seconds count from the end of the first update
to that of the last: neither starting services nor importing the simulator is among them. Targets: success >= 0.9 over
the last five updates, and at most 1.2 times the seconds of the plain process.

The stages of the job's update are the trainer's own: it waits for the rollout and the bus, fetches the batch, updates,
and publishes the weights. CPU seconds of each service are those from the submission to the end, per update; those of
the simulators are missing, because they end with the job.
``--out STEM`` writes STEM.json and STEM.png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from report import Report

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.base import load_yaml, with_overrides

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "metaworld-reach-ppo.yaml"
TARGET, GOAL, LAST = 1.2, 0.9, 5
LIMIT_S = 900.0
STAGES = ("wait", "fetch", "update", "publish")
PROCESSES = {
    "nats-server": "broker", "penstock.services.env": "env service", "penstock.services.rollout": "rollout",
    "penstock.services.trainer": "trainer", "penstock.services.coordinator": "coordinator",
}  # fmt: skip


def plain(seed: int, updates: int) -> dict[str, Any]:
    """The plain process; success, seconds and rollout of each update."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "reach" / "plain.py"), "--seed", str(seed), "--updates", str(updates)]
        subprocess.run([*command, "--out", str(out)], check=True, timeout=LIMIT_S)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def cpu_seconds() -> dict[tuple[str, int], float]:
    """CPU time of the deployment's processes until now, by name and process id."""
    used: dict[tuple[str, int], float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            name = next((name for part, name in PROCESSES.items() if part in line), "")
            if name:
                used[name, process.pid] = sum(process.cpu_times()[:2])
    return used


async def job(seed: int, updates: int, sessions: int, client: AsyncClient) -> dict[str, Any]:
    """The job; success, seconds and stages of each update, and CPU seconds of each process per update."""
    before = cpu_seconds()
    spec = with_overrides(
        load_yaml(EXAMPLE),
        [
            f"seed={seed}", f"train.max_updates={updates}", "evaluation.episodes=0", "checkpoint.every=1000",
            f"environment.sessions={sessions}", f"environment.num_envs={16 // sessions}",
        ],
    )  # fmt: skip
    record = await client.submit(spec)
    await client.wait(record.id, timeout_s=LIMIT_S)
    cpu: dict[str, float] = {}
    for (name, pid), spent in cpu_seconds().items():
        cpu[name] = cpu.get(name, 0.0) + (spent - before.get((name, pid), 0.0)) / updates
    metrics = await client.metrics(record.id, max_points=10_000)
    rates = [float(value) for value in metrics["series"]["success/rate"]]
    stages = {name: list(metrics["series"][f"seconds/{name}"]) for name in STAGES}
    return {"success": rates, "seconds": list(metrics["wall"]), "stages": stages, "cpu": cpu}


async def run(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All systems, in turn, for each seed."""
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "job, one session": [], "job, two sessions": []}
    with tempfile.TemporaryDirectory() as folder:
        options = StackOptions(data_dir=Path(folder), environment={"PENSTOCK_API_KEYS": "bench"})
        async with Stack(options, lambda text: None) as stack:
            await stack.ready(deadline_s=60)
            async with AsyncClient(stack.url, api_key=stack.api_key) as client:
                for seed in args.seeds:
                    found["plain"].append(await asyncio.to_thread(plain, seed, args.updates))
                    for sessions, name in ((1, "job, one session"), (2, "job, two sessions")):
                        found[name].append(await job(seed, args.updates, sessions, client))
                    for name, runs in found.items():
                        shown = f"{span(runs[-1]):.1f} s, success {end_of(runs[-1]):.2f}"
                        print(f"seed {seed}, {name}: {shown}", file=sys.stderr, flush=True)
    return found


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Success over seconds since the first update: a colour for each system, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    for number, (name, runs) in enumerate(found.items()):
        for place, one in enumerate(runs):
            since = [moment - one["seconds"][0] for moment in one["seconds"]]
            axis.plot(since, one["success"], color=f"C{number}", alpha=0.8, label=None if place else name)
    axis.axhline(GOAL, color="black", linewidth=0.6, linestyle=":")
    axis.set(
        xlabel="seconds since the first update",
        ylabel="success of the update's 16 episodes",
        ylim=(0, 1.02),
        xlim=(0, None),
    )
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def stages_of(runs: list[dict[str, Any]]) -> str:
    """Milliseconds of each stage of an update, medians over all updates but each run's first."""
    if "stages" not in runs[0]:
        rollout = 1e3 * statistics.median(one for run in runs for one in run["rollout"][1:])
        return f"rollout {rollout:.0f}"
    medians = {name: statistics.median(one for run in runs for one in run["stages"][name][1:]) for name in STAGES}
    return ", ".join(f"{name} {1e3 * value:.0f}" for name, value in medians.items())


def span(result: dict[str, Any]) -> float:
    """Seconds from the end of the first update to that of the last."""
    return float(result["seconds"][-1] - result["seconds"][0])


def end_of(result: dict[str, Any]) -> float:
    """Mean success of the last updates."""
    return float(statistics.mean(result["success"][-LAST:]))


def main() -> int:
    """Run, print, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(
        "Meta-World reach-v3 by PPO",
        ["system", "seconds", "of plain", "success at the end", "by seed", "ms of an update's stages"],
    )
    found = asyncio.run(run(args))
    seconds = {name: statistics.median(map(span, runs)) for name, runs in found.items()}
    for name, runs in found.items():
        ends = [end_of(one) for one in runs]
        ratio = seconds[name] / seconds["plain"]
        report.row(
            name, f"{seconds[name]:.1f}", f"{ratio:.2f}", f"{statistics.mean(ends):.3f}",
            " ".join(f"{one:.2f}" for one in ends), stages_of(runs),
        )  # fmt: skip
        if name != "plain":
            report.check(f"{name}: success at least {GOAL} with every seed", min(ends) >= GOAL)
    best = min(seconds[name] for name in found if name != "plain") / seconds["plain"]
    report.check(f"the faster job takes at most {TARGET} times the seconds of the plain process", best <= TARGET)
    pipelined = seconds["job, one session"] / seconds["job, two sessions"]
    report.results = {"runs": found, "seconds": seconds, "two_sessions_are_faster_by": pipelined}
    status = report.finish(args.out.with_suffix(".json") if args.out else None)
    if args.out is not None:
        draw(found, args.out.with_suffix(".png"))
    return status


if __name__ == "__main__":
    sys.exit(main())
