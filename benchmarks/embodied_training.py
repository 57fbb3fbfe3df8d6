"""A robot arm by PPO as a job of Penstock, beside one plain process: same machine, same run, same batch and budget.

    python benchmarks/embodied_training.py [--seeds 1 2 3] [--updates 40] [--out results/embodied.json]

The plain process (reach/plain.py) steps all environments in a loop and trains between. The job goes through five
services and NATS: 16 episodes of 100 steps an update, strictly on-policy, in one session of 16 environments, and in two
sessions of 8 of which one steps while the policy decides for the other. Seconds count from the end of the first update
to that of the last: neither starting services nor importing the simulator is among them. Targets: success >= 0.9 over
the last five updates, and at most 1.2 times the seconds of the plain process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Report

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.base import load_yaml, with_overrides

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "metaworld-reach-ppo.yaml"
TARGET, GOAL, LAST = 1.2, 0.9, 5
LIMIT_S = 900.0


def plain(seed: int, updates: int) -> dict[str, list[float]]:
    """The plain process; success and seconds of each update."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "reach" / "plain.py"), "--seed", str(seed), "--updates", str(updates)]
        subprocess.run([*command, "--out", str(out)], check=True, timeout=LIMIT_S)
        found: dict[str, list[float]] = json.loads(out.read_text())
    return found


async def job(seed: int, updates: int, sessions: int, client: AsyncClient) -> dict[str, list[float]]:
    """The job; success and seconds of each update."""
    spec = with_overrides(
        load_yaml(EXAMPLE),
        [
            f"seed={seed}", f"train.max_updates={updates}", "evaluation.episodes=0", "checkpoint.every=1000",
            f"environment.sessions={sessions}", f"environment.num_envs={16 // sessions}",
        ],
    )  # fmt: skip
    record = await client.submit(spec)
    await client.wait(record.id, timeout_s=LIMIT_S)
    metrics = await client.metrics(record.id, max_points=10_000)
    rates = [float(value) for value in metrics["series"]["success/rate"]]
    return {"success": rates, "seconds": list(metrics["wall"])}


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


def span(result: dict[str, list[float]]) -> float:
    """Seconds from the end of the first update to that of the last."""
    return result["seconds"][-1] - result["seconds"][0]


def end_of(result: dict[str, list[float]]) -> float:
    """Mean success of the last updates."""
    return statistics.mean(result["success"][-LAST:])


def main() -> int:
    """Run, print, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report("Meta-World reach-v3 by PPO", ["system", "seconds", "of plain", "success at the end", "by seed"])
    found = asyncio.run(run(args))
    seconds = {name: statistics.median(map(span, runs)) for name, runs in found.items()}
    for name, runs in found.items():
        ends = [end_of(one) for one in runs]
        ratio = seconds[name] / seconds["plain"]
        report.row(
            name, f"{seconds[name]:.1f}", f"{ratio:.2f}", f"{statistics.mean(ends):.3f}",
            " ".join(f"{one:.2f}" for one in ends),
        )  # fmt: skip
        if name != "plain":
            report.check(f"{name}: success at least {GOAL} with every seed", min(ends) >= GOAL)
    best = min(seconds[name] for name in found if name != "plain") / seconds["plain"]
    report.check(f"the faster job takes at most {TARGET} times the seconds of the plain process", best <= TARGET)
    pipelined = seconds["job, one session"] / seconds["job, two sessions"]
    report.results = {"runs": found, "seconds": seconds, "two_sessions_are_faster_by": pipelined}
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
