"""How long a new leader takes to lead again a job with very much undecided, and how fast it goes on meanwhile.

    python benchmarks/takeover.py [--out results.json] [--live-items 1000000] [--waiting 50000] [--pairs 20000]

Targets: led again within 10 s with a million live items that wait, and 5,000 pairs of a correction and its answer a
second while 50,000 wait (see ``live_items.py``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import uvloop
from live_items import matching, takeover
from report import Report

from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

LED_S, PAIRS = 10.0, 5_000


async def live(report: Report, arguments: argparse.Namespace) -> None:
    """Live items that wait."""
    found = matching(arguments.waiting, arguments.pairs)
    report.row(
        f"matching, {found.waiting} wait", f"{found.per_s:.0f} pairs/s ({found.per_cpu_s:.0f} per CPU second)",
        f"mark {1e3 * found.lowest_s:.2f} ms, sweep {1e3 * found.sweep_s:.1f} ms", "",
    )  # fmt: skip
    report.check(f"at least {PAIRS} pairs/s", found.per_s >= PAIRS)
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory) / "nats") as server:
        async with await Bus.connect(server.url, name="bench") as bus:
            await bus.ensure_streams(experience_bytes=1 << 30, stream_bytes=4 << 30)
            led = await takeover(bus, arguments.live_items)
    report.row(
        f"takeover, {led.items} live items", f"{led.seconds:.1f} s ({led.cpu_s:.1f} s of CPU)",
        f"loop lag {1e3 * led.lag_s:.0f} ms", f"{led.grown_mib:.0f} MiB",
    )  # fmt: skip
    report.check(f"led again within {LED_S:g} s", led.seconds <= LED_S)
    report.results |= {"matching": asdict(found), "takeover_live": asdict(led)}


async def main(arguments: argparse.Namespace) -> int:
    report = Report("Taking over what waits", ["what", "time", "meanwhile", "memory"])
    await live(report, arguments)
    return report.finish(arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--live-items", type=int, default=1_000_000)
    parser.add_argument("--waiting", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=20_000)
    sys.exit(uvloop.run(main(parser.parse_args())))
