"""Tokens per second of the embedded rollout engine beside transformers' ``generate`` and vLLM on the CPU.

    python benchmarks/engine.py [--models 1m 30m 100m] [--batches 1 64 256] [--rounds 3] [--out engine.json] [--quick]
                                [--transformers]

Every engine decodes the same completions with the same weights, in a process of its own with one thread
(``decoding/``); they take turns and the order rotates, because the machine may be shared. "equal": every prompt and
every completion is equally long, and all fit into the batch. "ragged": lengths are lognormal, and twice as many
completions as the batch has rows wait at the beginning. ``generate`` pads: each of its batches goes on until its
longest completion has ended. It returns tokens alone, the others a log-prob with each.

"16 rows": ragged groups of eight completions on 16 rows of the embedded engine. A rollout worker begins a group when
its first completion finds a free row; beside it stands the rule of beginning it when all of them do.

Ratios are medians over rounds, of CPU seconds: with one thread they are the seconds of a quiet machine, and hold on a
busy one, too. Ratios of wall time stand beside them. vLLM is the one that ``penstock engines install vllm`` made; where
there is none its column is left out. ``--transformers`` adds Penstock's engine of that name, which decodes one
completion at a time. ``--out`` is written after each model and batch.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from decoding.workload import MODELS, SHAPES
from report import Report
from steps.turns import System, Turn

from penstock.local.engines import engine_python
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.service import load_settings
from penstock.shared.errors import ConfigError
from penstock.shared.models import build_model

HERE = Path(__file__).resolve().parent
OWN, PADDED, VLLM, ANY = "embedded", "generate", "vllm", "transformers"
GOALS = {"equal": 1.2, "ragged": 2.0}
"""Times the tokens per second of ``generate``; ragged ones in batches, for one row pads nothing."""
VLLM_GOAL, VLLM_BATCH = 0.9, 256
FED, FEEDING_GOAL = "1m", 1.3
"""Times the groups per second of the rule that begins whole groups."""


@dataclass
class Measured:
    """One engine on one model and batch: a turn for each round, a step for each shape."""

    turns: list[Turn] = field(default_factory=list)

    def wall_s(self, shape: str) -> list[float]:
        """Seconds of each round."""
        return [turn.seconds[SHAPES.index(shape)] for turn in self.turns]

    def cpu_s(self, shape: str) -> list[float]:
        """CPU seconds of each round."""
        return [turn.cpu_s[SHAPES.index(shape)] for turn in self.turns]

    def tokens(self, shape: str) -> list[float]:
        """Sampled in each round."""
        return [turn.facts[shape] for turn in self.turns]


def ratio(ours: list[float], others: list[float]) -> float:
    """How many times faster we are: the median over rounds, in which both had a turn."""
    return median(other / own for own, other in zip(ours, others, strict=True))


def vllm_python() -> Path | None:
    """The interpreter with vLLM; None, with a line that says so, where there is none."""
    try:
        return engine_python(VLLM, load_settings().engines_dir)
    except ConfigError as error:
        print(f"vLLM is left out: {error}", file=sys.stderr)
        return None


def prepare(name: str, work: Path) -> Path:
    """A directory with the weights of a model."""
    directory, model = work / name, MODELS[name]
    config = ModelConfig.parse({"config": model.architecture, "tokenizer": "char"})
    build_model(config, model.vocab_size, seed=0).save_pretrained(directory)
    return directory


def measure(name: str, batch: int, pythons: dict[str, Path], work: Path, rounds: int) -> dict[str, Measured]:
    """All rounds of all engines."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    systems = {
        engine: System(
            [str(python), "-m", "decoding.systems", engine, name, str(batch), str(work / name)],
            environment=environment, log=work / f"{name}.{batch}.{engine}.log",
        )
        for engine, python in pythons.items()
    }  # fmt: skip
    for system in systems.values():
        system.loaded()
    found: dict[str, Measured] = {engine: Measured() for engine in systems}
    names = list(systems)
    for number in range(rounds):
        shift = number % len(names)
        for engine in names[shift:] + names[:shift]:
            found[engine].turns.append(systems[engine].turn(len(SHAPES)))
        cpu = ", ".join(f"{one} {' '.join(f'{s:.2f}' for s in found[one].turns[-1].cpu_s)}" for one in names)
        load = os.getloadavg()[0]
        print(f"{name}, batch {batch}, round {number + 1}: {cpu} CPU s, load {load:.1f}", file=sys.stderr, flush=True)
    for system in systems.values():
        system.close()
    return found


def add_feeding(report: Report, name: str, work: Path, rounds: int) -> None:
    """Row and check of groups on few rows."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "decoding.feeding", name, str(work / name)]
    system = System(command, environment=environment, log=work / f"{name}.feeding.log")
    system.loaded()
    turns = [system.turn(2) for _ in range(rounds)]
    system.close()
    cpu = ratio([turn.cpu_s[1] for turn in turns], [turn.cpu_s[0] for turn in turns])
    wall = ratio([turn.seconds[1] for turn in turns], [turn.seconds[0] for turn in turns])
    report.results[f"{name}.groups"] = {
        "ratios": {"cpu": cpu, "wall": wall},
        "whole": [{"wall": turn.seconds[0], "cpu": turn.cpu_s[0]} for turn in turns],
        "rows": [{"wall": turn.seconds[1], "cpu": turn.cpu_s[1]} for turn in turns],
    }
    text = f"{name}, groups of 8 on 16 rows: {cpu:.2f} times those begun whole ({wall:.2f} by wall time)"
    report.check(f"{text}, goal {FEEDING_GOAL}", cpu >= FEEDING_GOAL)


def add(report: Report, name: str, batch: int, found: dict[str, Measured]) -> None:
    """Rows and checks of one model and batch."""
    own = found[OWN]
    for shape in SHAPES:
        rates, ratios = {}, {}
        for engine, one in found.items():
            rates[engine] = median(n / s for n, s in zip(one.tokens(shape), one.cpu_s(shape), strict=True))
            cpu, wall = ratio(own.cpu_s(shape), one.cpu_s(shape)), ratio(own.wall_s(shape), one.wall_s(shape))
            ratios[engine] = {"cpu": cpu, "wall": wall}
        cells = [f"{rates[engine]:,.0f}" if engine in rates else "-" for engine in (OWN, PADDED, VLLM)]
        for engine in (PADDED, VLLM):
            kinds = ratios.get(engine, {})
            cells += [f"{kinds[kind]:.2f}" if kinds else "-" for kind in ("cpu", "wall")]
        if ANY in rates:
            cells += [f"{rates[ANY]:,.0f}", f"{ratios[ANY]['cpu']:.2f}", f"{ratios[ANY]['wall']:.2f}"]
        report.row(f"{name}, batch {batch}, {shape}", *cells)
        report.results[f"{name}.{batch}.{shape}"] = {
            "tokens_per_cpu_s": rates,
            "ratios": ratios,
            "seconds": {engine: {"wall": one.wall_s(shape), "cpu": one.cpu_s(shape)} for engine, one in found.items()},
        }
        beside, goal = ratios[PADDED]["cpu"], GOALS[shape]
        if shape == "equal" or batch > 1:
            text = f"{name}, batch {batch}, {shape}: {beside:.2f} times generate, goal {goal}"
            report.check(text, beside >= goal)
        if VLLM in ratios and batch == VLLM_BATCH:
            beside = ratios[VLLM]["cpu"]
            text = f"{name}, batch {batch}, {shape}: {beside:.2f} of vLLM, goal {VLLM_GOAL}"
            report.check(text, beside >= VLLM_GOAL)


def main() -> int:
    """Command line; the exit status is 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the smallest model, batches of 1 and 64, one round")
    parser.add_argument("--transformers", action="store_true", help="add the engine `transformers`")
    parser.add_argument("--work", type=Path, default=Path(".bench/engine"), help="weights and logs")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    if args.quick:
        args.models, args.batches, args.rounds = ["1m"], [1, 64], 1
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pythons = {OWN: Path(sys.executable), PADDED: Path(sys.executable)}
    if (python := vllm_python()) is not None:
        pythons[VLLM] = python
    columns = [f"{engine} tok/s" for engine in (OWN, PADDED, VLLM)] + ["x generate", "wall", "x vLLM", "wall"]
    if args.transformers:
        pythons[ANY] = Path(sys.executable)
        columns += [f"{ANY} tok/s", f"x {ANY}", "wall"]
    report = Report(
        f"decoding, float32, one thread each, {args.rounds} rounds; tokens per CPU second",
        ["model", *columns],
    )
    for name in args.models:
        prepare(name, work)
        if name == FED:
            add_feeding(report, name, work, args.rounds)
        for batch in args.batches:
            add(report, name, batch, measure(name, batch, pythons, work, args.rounds))
            report.write(args.out)
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
