"""Message and claim-check rates of the bus beside raw TCP, ZeroMQ and Ray, all in one run on one machine.

    python benchmarks/bus.py [--out results.json] [--reps 3] [--peers PYTHON]

``--peers`` names the interpreter of an environment with numpy, pyzmq and ray (default: this one); what is missing there
is shown as not installed. Rates are the best of ``--reps`` rounds, in which the candidates take turns, because the
machine may be shared; compare ratios, not absolute numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from report import Report

from penstock.shared.transport.server import NatsServer

KIB, MIB = 1 << 10, 1 << 20
COUNTS = {KIB: 10_000, MIB: 300, 64 * MIB: 16}
NAMES = {
    "tcp": "raw TCP, blocking",
    "penstock": "Penstock request; claim check from 1 MiB",
    "notify": "Penstock notify, one way",
    "zmq": "ZeroMQ PUSH/PULL",
    "ray": "Ray actor + object store",
}
MODULES = {"zmq": "zmq", "ray": "ray"}
TIMEOUT_S = 120.0


@contextmanager
def role(python: str, name: str, size: int, count: int, address: str) -> Iterator[subprocess.Popen[str]]:
    """A process of planes.py; killed at the end if it still runs."""
    command = [python, str(Path(__file__).with_name("planes.py")), name, str(size), str(count), address]
    errors = None if os.environ.get("BENCH_DEBUG") else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """The JSON line that a role prints last."""
    output, _ = process.communicate(timeout=TIMEOUT_S)
    rows = [line for line in output.splitlines() if line.startswith("{")]
    if not rows:
        raise RuntimeError(f"{process.args!r} printed no result (BENCH_DEBUG=1 shows why)")
    found: dict[str, float] = json.loads(rows[-1])
    return found


def rate(python: str, name: str, size: int, url: str) -> float:
    """Messages per second of one candidate."""
    count = COUNTS[size]
    if name == "ray":
        with role(python, "ray_driver", size, max(count // 5, 4), "") as driver:
            return answer(driver)["rate"]
    with role(python, f"{name}_consumer", size, count, url) as consumer:
        assert consumer.stdout is not None
        address = consumer.stdout.readline().removeprefix("READY ").strip()
        with role(python, f"{name}_producer", size, count, address):
            return answer(consumer)["rate"]


def latency(size: int, count: int, url: str) -> dict[str, float]:
    """Seconds of sequential requests, p50 and p99."""
    with role(sys.executable, "penstock_consumer", size, count, url) as consumer:
        assert consumer.stdout is not None
        consumer.stdout.readline()
        with role(sys.executable, "penstock_latency", size, count, url) as producer:
            return answer(producer)


def memcpy_rate(size: int) -> float:
    """Copies per second of one thread between warm buffers."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(max(1, (64 * MIB) // size)):
            np.copyto(target, source)
        best = min(best, (time.perf_counter() - start) / max(1, (64 * MIB) // size))
    return 1 / best


def has(python: str, module: str) -> bool:
    """True if ``python`` can import ``module``."""
    return subprocess.run([python, "-c", f"import {module}, numpy"], capture_output=True, check=False).returncode == 0


def measure(peers: str, reps: int, url: str) -> dict[str, dict[int, float]]:
    """Best rate of each candidate by message size; candidates take turns."""
    pythons = {name: peers if name in MODULES else sys.executable for name in NAMES}
    present = [name for name in NAMES if name not in MODULES or has(pythons[name], MODULES[name])]
    best: dict[str, dict[int, float]] = {name: {} for name in NAMES}
    for size in COUNTS:
        for rep in range(reps):
            for name in present:
                once = name == "ray" and rep > 0  # starting Ray takes longer than everything else
                if not once and not (name == "notify" and size > KIB):
                    best[name][size] = max(best[name].get(size, 0.0), rate(pythons[name], name, size, url))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--peers", default=sys.executable, help="interpreter that has pyzmq and ray")
    args = parser.parse_args()
    report = Report(
        "Bus and bulk plane, two processes on one host",
        ["", "1 KiB msg/s", "1 MiB MB/s", "x TCP", "64 MiB MB/s", "x TCP"],
    )
    with NatsServer() as server:
        best = measure(args.peers, args.reps, server.url)
        small = latency(KIB, 2000, server.url)
        observation = latency(64 * 224 * 224 * 3, 200, server.url)
    best = {"memcpy": {size: memcpy_rate(size) for size in COUNTS}, **best}
    for name, rates in best.items():
        if not rates:
            report.row(NAMES[name], *["not installed"] * 3, "", "")
            continue
        cells = [f"{rates[KIB]:,.0f}"]
        for size in (MIB, 64 * MIB):
            if size not in rates:
                cells += ["by claim", ""]
                continue
            cells += [f"{rates[size] * size / 1e6:,.0f}", f"{rates[size] / best['tcp'][size]:.2f}"]
        report.row(NAMES.get(name, "memcpy, one thread"), *cells)
    report.row(
        "request and reply, 1 KiB, p50 / p99 ms", f"{small['p50'] * 1e3:.2f} / {small['p99'] * 1e3:.2f}", *[""] * 4
    )
    seen = f"{observation['p50'] * 1e3:.2f} / {observation['p99'] * 1e3:.2f}"
    report.row("observation of 9.6 MB and reply, p50 / p99 ms", seen, *[""] * 4)
    report.results = {"rates": best, "request": small, "observation": observation}
    ratio = best["penstock"][64 * MIB] / best["tcp"][64 * MIB]
    report.check(f"64 MiB through a claim check: {ratio:.2f} x raw TCP, target 1.8", ratio >= 1.8)
    report.check(f"small request and reply: p50 {small['p50'] * 1e3:.2f} ms, target below 1", small["p50"] < 1e-3)
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
