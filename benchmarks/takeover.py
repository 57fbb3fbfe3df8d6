"""How long a new leader takes to lead again a job with very much undecided, and how fast it goes on meanwhile.

    python benchmarks/takeover.py [--out results.json] [--groups 100000] [--live-items 1000000] [--waiting 50000]
                                  [--pairs 20000]

Targets: led again within 10 s with 100,000 kept groups and with a million live items that wait; 5,000 pairs of a
correction and its answer a second while 50,000 wait (see ``live_items.py``); nine batches of 2,048 groups decided on
in 50 ms of CPU (see ``kept_groups.py``). No hold-up of the event loop above 250 ms. 0 groups or items: not that one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import kept_groups
import uvloop
from live_items import matching, takeover
from report import Report

from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

LED_S, PAIRS = 10.0, 5_000
SEALED_S, LAG_S = 0.05, 0.25


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
            await bus.ensure_streams(experience_bytes=1 << 28, stream_bytes=1 << 30)
            led = await takeover(bus, arguments.live_items)
    report.row(
        f"takeover, {led.items} live items", f"{led.seconds:.1f} s ({led.cpu_s:.1f} s of CPU)",
        f"loop lag {1e3 * led.lag_s:.0f} ms", f"{led.grown_mib:.0f} MiB",
    )  # fmt: skip
    report.check(f"led again within {LED_S:g} s", led.seconds <= LED_S)
    report.check(f"no hold-up above {1e3 * LAG_S:g} ms", led.lag_s <= LAG_S)
    report.results |= {"matching": asdict(found), "takeover_live": asdict(led)}


async def kept(report: Report, arguments: argparse.Namespace) -> None:
    """Groups that were trained and are still there."""
    sealing = min(kept_groups.sealing_seconds() for _ in range(3))
    report.row("sealing, 9 batches of 2,048 groups", f"{1e3 * sealing:.0f} ms of CPU", "", "")
    report.check(f"sealed within {1e3 * SEALED_S:g} ms", sealing <= SEALED_S)
    led = await kept_groups.takeover(arguments.groups, arguments.per_batch)
    report.row(
        f"takeover, {led.groups} kept groups", f"{led.seconds:.1f} s", f"loop lag {1e3 * led.lag_s:.0f} ms",
        f"{led.rss_mib:.0f} MiB",
    )  # fmt: skip
    report.check(f"led again within {LED_S:g} s, kept groups", led.seconds <= LED_S)
    report.check(f"no hold-up above {1e3 * LAG_S:g} ms, kept groups", led.lag_s <= LAG_S)
    report.check("the first lease was kept", led.epoch == 1)
    report.results |= {"sealing_s": sealing, "takeover_kept": asdict(led)}


async def main(arguments: argparse.Namespace) -> int:
    report = Report("Taking over what waits", ["what", "time", "meanwhile", "memory"])
    if arguments.groups:
        await kept(report, arguments)
    if arguments.live_items:
        await live(report, arguments)
    return report.finish(arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--per-batch", type=int, default=16)
    parser.add_argument("--live-items", type=int, default=1_000_000)
    parser.add_argument("--waiting", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=20_000)
    sys.exit(uvloop.run(main(parser.parse_args())))
