"""GRPO in Penstock beside TRL and beside a plain loop: same machine, same run, same checkpoint, prompts and batch.

    python benchmarks/vs_trl.py --trl-python PYTHON [--workloads short long] [--rounds 3] [--out results/vs-trl]

Workloads and reward: grpo/task.py. Rounds are paired by seed, the systems take turns within each round and the order
rotates, because the machine may be shared; ratios are medians over the pairs. TRL and the plain loop use torch's
default threads (all cores); a second plain loop samples one version ahead, to show what lag alone does to learning.
Penstock's rollout and trainer share the cores where they overlap (lag 1) and each use all of them where they take turns
(lag 0). ``--out STEM`` writes STEM.json and STEM.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from grpo.summary import account_table, learning_table, ratio, samples_to, speed, speed_table
from grpo.task import BATCH, WORKLOADS, Run, read_run, write_rows
from report import machine

HERE = Path(__file__).resolve().parent
REFERENCE = "trl"
BARE = {"bare": 0, "bare lag 1": 1}
LAGS = {"penstock lag 1": 1, "penstock lag 0": 0}
TARGETS = {("long", 1): 1.25, ("short", 1): 1.1, ("long", 0): 1.0, ("short", 0): 0.85}
GOAL = 0.9
EQUAL_LEARNING = 0.15
"""How far the samples until the goal may be from TRL's, either way."""
TIMEOUT_S = 3600.0


class Bench:
    """Runs one system after another in processes of their own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._work = args, args.work.resolve()
        self._work.mkdir(parents=True, exist_ok=True)
        self.systems = [name for name in (REFERENCE, *BARE, *LAGS) if name in args.systems]

    def workload(self, name: str) -> dict[str, list[Run]]:
        """All rounds of all systems."""
        model = self._work / name
        if not (model / "config.json").exists():
            self._python(sys.executable, "grpo.checkpoint", [name, str(model)])
        found: dict[str, list[Run]] = {system: [] for system in self.systems}
        for number in range(self._args.rounds):
            rows = self._work / f"{name}.{number}.jsonl"
            write_rows(rows, WORKLOADS[name], seed=number)
            shift = number % len(self.systems)
            for system in self.systems[shift:] + self.systems[:shift]:
                run = self._run(system, name, model, rows, number)
                found[system].append(run)
                print(f"{name}, round {number + 1}, {system}: {_brief(run)}", file=sys.stderr, flush=True)
        return found

    def _run(self, system: str, workload: str, model: Path, rows: Path, seed: int) -> Run:
        args = self._args
        result = self._work / f"{workload}.{seed}.{system.replace(' ', '-')}.json"
        steps = args.steps_short if workload == "short" else args.steps_long
        options = [workload, str(model), str(rows), str(result), "--steps", str(steps), "--seed", str(seed)]
        if workload == "short":
            options += ["--goal", str(GOAL)]
        if system == REFERENCE:
            self._python(args.trl_python, "grpo.trl_run", [*options, "--threads", str(args.threads)])
        elif system in BARE:
            options += ["--threads", str(args.threads), f"--max-lag={BARE[system]}"]
            self._python(sys.executable, "grpo.bare_run", options)
        else:
            lag = LAGS[system]
            rollout, trainer = args.threads_lag1 if lag else args.threads_lag0
            options += [f"--max-lag={lag}", f"--rollout-threads={rollout}", f"--trainer-threads={trainer}"]
            self._python(sys.executable, "grpo.penstock_run", [*options, *(f"--env={pair}" for pair in args.env)])
        return read_run(result)

    def _python(self, python: str, module: str, options: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        done = subprocess.run(
            [python, "-m", module, *options],
            cwd=self._work, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{module} {' '.join(options)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def _brief(run: Run) -> str:
    only = speed([run])[0]
    return (
        f"{len(run.steps)} steps, {only.wall_s:.4f} s/step, {only.cpu_s:.4f} CPU s/step, load {os.getloadavg()[0]:.1f}"
    )


def _compact(run: Run) -> dict[str, Any]:
    """For the result file: times count from the start of the run."""
    rows = [[round(s.time - run.start, 4), round(s.reward, 4), s.tokens, round(s.cpu_s, 3)] for s in run.steps]
    return {
        "startup_s": run.startup_s,
        "facts": run.facts,
        "columns": ["s", "reward", "tokens", "cpu_s"],
        "steps": rows,
    }


def _checks(name: str, found: dict[str, list[Run]]) -> dict[str, bool]:
    checks = {}
    for system, lag in LAGS.items():
        if system in found and REFERENCE in found:
            text, beside = f"{name}, {system}: {TARGETS[name, lag]:g} x TRL", ratio(found[REFERENCE], found[system])
            checks[f"{text} ({beside:.2f})"] = beside >= TARGETS[name, lag]
        if name == "short" and system in found and REFERENCE in found:
            samples = samples_to(found[system], GOAL) / samples_to(found[REFERENCE], GOAL)
            text = f"{name}, {system}: samples to {GOAL:g} within {EQUAL_LEARNING:.0%} of TRL's ({samples:.2f})"
            checks[text] = abs(samples - 1) <= EQUAL_LEARNING
        for run in found.get(system, []):
            text = f"{name}, {system}: lag within {lag}, the ledger adds up"
            checks[text] = checks.get(text, True) and run.facts["audit"]["ok"] and run.facts["lag"] <= lag
    if name == "long":
        tokens = {step.tokens for runs in found.values() for run in runs for step in run.steps}
        checks[f"long: every system generated {BATCH * 64} tokens in each step"] = tokens == {float(BATCH * 64)}
    return checks


def _text(results: dict[str, dict[str, list[Run]]], checks: dict[str, bool], facts: dict[str, Any]) -> str:
    parts = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
        f"load {facts['load'][0]} before and {facts['load_after']} after; {facts['rounds']} rounds."
    ]
    for name, found in results.items():
        parts += [f"### {name}: speed", speed_table(found, REFERENCE)]
        if name == "short":
            parts += [f"### {name}: time to a sampled reward of {GOAL:g}", learning_table(found, GOAL)]
        parts += [f"### {name}: where a step of Penstock goes", account_table(found)]
    parts += ["### Targets", "\n".join(f"- {'met' if holds else 'MISSED'}: {text}" for text, holds in checks.items())]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of an environment with trl (needed for its rows)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--systems", nargs="+", default=[REFERENCE, *BARE, *LAGS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps-short", type=int, default=1200)
    parser.add_argument("--steps-long", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="of TRL and the plain loop; 0: torch's default")
    cores = len(os.sched_getaffinity(0))
    half, pair = [max(1, cores // 2)] * 2, ("ROLLOUT", "TRAINER")
    parser.add_argument("--threads-lag1", type=int, nargs=2, default=half, metavar=pair)
    parser.add_argument("--threads-lag0", type=int, nargs=2, default=[cores, cores], metavar=pair)
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="for the services of Penstock")
    parser.add_argument("--work", type=Path, default=Path(".bench/vs-trl"), help="checkpoints, prompts and raw results")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if REFERENCE in args.systems and not args.trl_python:
        parser.error("--trl-python is needed, or --systems without trl; `make bench-vs-trl` sets it up")
    started = machine()
    bench = Bench(args)
    results = {name: bench.workload(name) for name in args.workloads}
    checks = {text: holds for name, found in results.items() for text, holds in _checks(name, found).items()}
    facts = {**started, "load_after": round(os.getloadavg()[0], 2), "rounds": args.rounds}
    text = _text(results, checks, facts)
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        runs = {}
        for name, found in results.items():
            runs[name] = {system: [_compact(run) for run in same] for system, same in found.items()}
        content = {"machine": facts, "checks": checks, "runs": runs}
        args.out.with_suffix(".json").write_text(json.dumps(content) + "\n")
        args.out.with_suffix(".md").write_text(text)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
