"""Cost of one contained run, beside a bare interpreter.

    python benchmarks/sandbox.py [--runs 200]

Prints milliseconds for each mechanism of this machine: opening (with its proof), then runs of a program that prints a
number, of one whose function is called, and of one that uses numpy (imported once, before the fork).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import get_args

from penstock.shared.config.rewards.scorers import CodeScorer
from penstock.shared.errors import SandboxError
from penstock.shared.sandbox.plan import Job, Mechanism
from penstock.shared.sandbox.sandbox import Sandbox

PRINT = Job("print(int(input()) * 2)", [], "")
CALL = Job("def f(x):\n    return x * 2", [{"call": "f", "args": [21], "kwargs": {}}], "n")
NUMPY = Job("import numpy\nprint(numpy.arange(3).sum())", [], "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    print(row("bare python -c", [milliseconds(lambda: bare("print(42)")) for _ in range(runs // 4)]))
    for mechanism in get_args(Mechanism):
        started = time.perf_counter()
        try:
            config = CodeScorer(site_packages=True, preload=["numpy"], memory_bytes=1 << 30)
            sandbox = Sandbox(config, [mechanism])
        except SandboxError as error:
            print(f"{mechanism}: {error}")
            continue
        with closing(sandbox):
            print(row(f"{mechanism}: open", [(time.perf_counter() - started) * 1e3]))
            for name, job, count in (("print", PRINT, runs), ("call", CALL, runs), ("numpy", NUMPY, runs // 10)):
                times = [milliseconds(partial(sandbox.run, job, "21\n", 10.0)) for _ in range(count)]
                print(row(f"{mechanism}: {name}", times))


def bare(program: str) -> None:
    """A new interpreter without any containment."""
    subprocess.run([sys.executable, "-S", "-c", program], check=True, stdout=subprocess.DEVNULL)


def milliseconds(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def row(name: str, times: list[float]) -> str:
    """Least, median and 95th percentile."""
    times = sorted(times)
    p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
    return f"{name:24} min {times[0]:7.2f}   median {statistics.median(times):7.2f}   p95 {p95:7.2f} ms"


if __name__ == "__main__":
    main()
