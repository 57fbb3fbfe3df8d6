"""Tokens per second of Penstock's training step, beside TRL's and beside a bare PyTorch loop.

    python benchmarks/trainer.py --trl-python PYTHON [--workloads ragged short] [--rounds 7] [--out trainer.json]
    python benchmarks/trainer.py --trl-python PYTHON --workloads large --device cuda --dtype bfloat16 --peak-tflops 989

All systems train the same weights on the same completions with the same optimizer settings and threads, each in a
process of its own (steps/); no services. They take turns within each round and the order rotates, because the machine
may be shared; ratios are medians over rounds. The bare loop has several forms (steps/bare_step.py), and the fastest of
them is the reference; forms that need half as much CPU time again in the first step are left out. Trained tokens are
those with a gradient, forwarded ones all positions that went through the layers, padding included. The gradient norms
of the first step must agree: all systems do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from report import Report
from steps.turns import System, Turn
from steps.workload import WORKLOADS, Workload

HERE = Path(__file__).resolve().parent
PENSTOCK, TRL = "Penstock", "TRL"
TARGET = 0.95
LEFT_OUT = 1.5
AGREE = {"float32": 1e-3, "bfloat16": 5e-2}
MIB = 1 << 20


@dataclass
class Measured:
    """One system on one workload: its state after loading, its first step, then one turn for each round."""

    loaded: Turn
    first: Turn
    turns: list[Turn] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of a step, the median of each turn."""
        return [median(turn.seconds) for turn in self.turns]

    @property
    def cpu_s(self) -> list[float]:
        """CPU time of a step, the median of each turn."""
        return [median(turn.cpu_s) for turn in self.turns]

    @property
    def peak_bytes(self) -> int:
        """Most memory that the process ever had."""
        return max(turn.peak_bytes for turn in self.turns)

    def times_faster_than(self, other: Measured) -> float:
        """Median over rounds, in which both had a turn."""
        return median(o / s for o, s in zip(other.seconds, self.seconds, strict=True))

    def times_less_cpu_than(self, other: Measured) -> float:
        """Likewise of CPU time, which holds on a busy machine, too."""
        return median(o / s for o, s in zip(other.cpu_s, self.cpu_s, strict=True))


class Bench:
    """Prepares a workload and lets its systems take turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._work = args, args.work.resolve()
        self._environment = {**os.environ, "PYTHONPATH": str(HERE)}

    def prepare(self, workload: Workload) -> dict[str, Any]:
        """Write weights and batch; returns the facts of the workload."""
        directory = self._work / workload.name
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "steps.checkpoint", workload.name, str(directory)]
        command += ["--device", self._args.device, "--seed", str(self._args.seed)]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        facts: dict[str, Any] = json.loads((directory / "facts.json").read_text())
        return facts

    def measure(self, workload: Workload) -> dict[str, Measured]:
        """All rounds of all systems."""
        systems = {name: self._start(name, workload) for name in self._names(workload)}
        loaded = {name: system.loaded() for name, system in systems.items()}
        found = {name: Measured(loaded[name], system.turn(1)) for name, system in systems.items()}
        for name in _slow(found):
            systems.pop(name).close()
            del found[name]
            print(f"{workload.name}: {name} is left out", file=sys.stderr, flush=True)
        names = list(systems)
        for number in range(self._args.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                found[name].turns.append(systems[name].turn(workload.steps))
            times = ", ".join(f"{name} {found[name].seconds[-1]:.4f}" for name in names)
            load = os.getloadavg()[0]
            print(f"{workload.name}, round {number + 1}: {times} s/step, load {load:.1f}", file=sys.stderr, flush=True)
        for system in systems.values():
            system.close()
        return found

    def _names(self, workload: Workload) -> list[str]:
        trl = [TRL] if self._args.trl_python else []
        return [PENSTOCK, *trl, *(f"bare, {form}" for form in workload.forms)]

    def _start(self, name: str, workload: Workload) -> System:
        args = self._args
        module = {PENSTOCK: "steps.penstock_step", TRL: "steps.trl_step"}.get(name, "steps.bare_step")
        python = args.trl_python if name == TRL else sys.executable
        command = [python, "-m", module, workload.name, str(self._work / workload.name)]
        command += ["--threads", str(args.threads), "--device", args.device, "--dtype", args.dtype]
        if name not in (PENSTOCK, TRL):
            command += ["--form", name.removeprefix("bare, ")]
        log = self._work / f"{workload.name}.{name.replace(', ', '-')}.log"
        return System(command, environment=self._environment, log=log)


def _slow(found: dict[str, Measured]) -> list[str]:
    bare = {name: one.first.cpu_s[0] for name, one in found.items() if name not in (PENSTOCK, TRL)}
    return [name for name, seconds in bare.items() if seconds > LEFT_OUT * min(bare.values())]


def _add(
    report: Report, name: str, facts: dict[str, Any], found: dict[str, Measured], args: argparse.Namespace
) -> None:
    bare = [system for system in found if system not in (PENSTOCK, TRL)]
    reference = min(bare, key=lambda system: median(found[system].seconds))
    for system, one in found.items():
        seconds, forwarded = median(one.seconds), one.first.facts["forwarded"]
        tflops = facts["flops"] / seconds / 1e12
        beside = one.times_faster_than(found[TRL]) if TRL in found else None
        memory = one.first.facts.get("peak_device_bytes", one.peak_bytes)
        report.row(
            f"{name}: {system}{' *' if system == reference else ''}", f"{seconds:.4f}", f"{median(one.cpu_s):.4f}",
            f"{facts['trained_tokens'] / seconds:,.0f}", f"{forwarded / seconds:,.0f}",
            f"{one.times_faster_than(found[reference]):.3f}", f"{one.times_less_cpu_than(found[reference]):.3f}",
            "-" if beside is None else f"{beside:.2f}",
            f"{memory / MIB:,.0f}", f"{one.loaded.resident_bytes / MIB:,.0f}", f"{tflops:.3f}",
            f"{tflops / args.peak_tflops:.1%}" if args.peak_tflops else "-",
        )  # fmt: skip
    ratio = found[PENSTOCK].times_faster_than(found[reference])
    report.check(f"{name}: {TARGET} of the fastest bare loop, '{reference}' ({ratio:.3f})", ratio >= TARGET)
    norms = [one.first.facts["grad_norm"] for one in found.values()]
    spread = (max(norms) - min(norms)) / min(norms)
    report.check(f"{name}: gradient norms of the first step agree ({spread:.1e})", spread < AGREE[args.dtype])
    report.results[name] = {
        **facts,
        "reference": reference,
        "systems": {system: _numbers(one) for system, one in found.items()},
    }


def _numbers(one: Measured) -> dict[str, Any]:
    return {
        "seconds": [[round(value, 6) for value in turn.seconds] for turn in one.turns],
        "cpu_s": [[round(value, 6) for value in turn.cpu_s] for turn in one.turns],
        "loaded_bytes": one.loaded.resident_bytes,
        "peak_bytes": one.peak_bytes,
        "first_step": one.first.facts,
        "last_step": one.turns[-1].facts,
    }


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of an environment with trl; without it TRL is left out")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["ragged", "short"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="of every system; 0: torch's default")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(AGREE), default="float32")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the model FLOPs utilisation")
    parser.add_argument("--work", type=Path, default=Path(".bench/trainer"), help="weights, batches and logs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(
        f"one training step, {args.device}, {args.dtype}, {args.rounds} rounds (* fastest bare loop)",
        ["system", "s/step", "CPU s/step", "trained tok/s", "forwarded tok/s", "x bare", "x bare, CPU", "x TRL",
         "peak MiB", "loaded MiB", "TFLOP/s", "MFU"],
    )  # fmt: skip
    bench = Bench(args)
    for name in args.workloads:
        facts = bench.prepare(WORKLOADS[name])
        _add(report, name, facts, bench.measure(WORKLOADS[name]), args)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
