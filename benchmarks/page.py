"""First paint of the web page, and the time until it shows what was asked for, in Chromium.

    python benchmarks/page.py [--out results.json] [--jobs 200] [--updates 2000] [--loads 10]

nats-server (every message synced to disk), the coordinator and the browser are processes of their own. The deployment
has jobs that are over; the newest has 50 metrics for each of its updates. A load begins with the request for the page
and ends with the frame that shows the rows of the list, or the curves of that job. The browser has the key already.
Needs Chromium (``PENSTOCK_CHROMIUM`` may name it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec
from jobs import JOB
from playwright.sync_api import Browser, BrowserContext, ViewportSize, sync_playwright
from report import Report

from penstock.local.ingest_rates import Front
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.jobs import JobRecord, JobStatus
from penstock.shared.transport.bus import Bus, Outgoing

KEY = "bench-key"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
DESKTOP: ViewportSize = {"width": 1440, "height": 1000}
WAIT_MS = 60_000
NUM_METRICS = 50
ROWS = 60
"""Rows that the list shows before a user asks for more."""
GOAL_MS = 1000.0
CURVES = (
    "reward/mean", "mismatch/kl", "lag/kl", "lag/mean", "lag/max", "policy/kl_ref", "policy/entropy",
    "policy/clip_high", "policy/clip_low", "loss/policy", "optimizer/grad_norm", "length/mean",
    "tokens_per_s/generated", "tokens_per_s/trained",
)  # fmt: skip
"""Metrics of the overview; the others of a job have names of their own."""
WATCH = """(() => {
  if (!location.protocol.startsWith("http")) return;
  sessionStorage.setItem("penstock-key", %(key)s);
  const painted = new Promise((resolve) => {
    const observer = new PerformanceObserver((found) => {
      for (const { startTime } of found.getEntriesByName("first-contentful-paint")) resolve(startTime);
    });
    observer.observe({ type: "paint", buffered: true });
  });
  const shown = new Promise((resolve) => {
    const observer = new MutationObserver(() => {
      if (document.querySelectorAll(%(sign)s).length < %(count)d) return;
      observer.disconnect();
      requestAnimationFrame(() => setTimeout(() => resolve(performance.now()))); // behind the frame that shows them
    });
    observer.observe(document, { childList: true, subtree: true });
  });
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error("not shown in time")), %(wait_ms)d));
  window.loaded = Promise.race([Promise.all([painted, shown]), late]);
  window.loaded.catch(() => {}); // whoever asks for it gets the error
})()"""


@dataclass(frozen=True)
class Load:
    """Something to load: a view, how many elements of a selector show that it is there, and from which cache."""

    name: str
    view: str
    sign: str
    count: int
    is_cached: bool = False


async def fill(url: str, num_jobs: int, num_updates: int) -> str:
    """Store records of jobs that are over, and metrics of the newest; returns the id of that one."""
    status = JobStatus(
        phase="succeeded", step=num_updates, total_steps=num_updates,
        draws={"drawn": 10, "trained": 10, "in_flight": 0, "dropped": {}},
    )  # fmt: skip
    records = [
        JobRecord(id=new_job_id(), name=f"job-{n}", created_at=datetime.now(UTC), status=status, spec=JOB)
        for n in range(num_jobs)
    ]
    newest = records[-1].id
    names = [*CURVES, *(f"group{n % 5}/metric_{n}" for n in range(NUM_METRICS - len(CURVES)))]
    rows = [
        {"kind": "train", "step": step, "batch": step, "version": step, "entry": 0, "time": 1.8e9 + step,
         "values": dict.fromkeys(names, step % 97 / 97)}
        for step in range(num_updates)
    ]  # fmt: skip
    messages = [Outgoing(subjects.metrics(newest), msgspec.json.encode(row)) for row in rows]
    async with await Bus.connect(url, name="bench") as bus:
        for record in records:
            await bus.kv(subjects.JOBS).update(record.id, record.stored(), 0)
        for start in range(0, len(messages), 500):
            await bus.publish_many(messages[start : start + 500], deadline_s=60)
    return newest


def times(browser: Browser, address: str, load: Load, count: int) -> list[tuple[float, float]]:
    """First contentful paint and the end of each load, in ms from its beginning."""

    def fresh() -> BrowserContext:
        context = browser.new_context(viewport=DESKTOP)
        sign = {"sign": json.dumps(load.sign), "count": load.count, "wait_ms": WAIT_MS}
        context.add_init_script(WATCH % {"key": json.dumps(KEY), **sign})
        return context

    def once(context: BrowserContext) -> tuple[float, float]:
        page = context.new_page()
        page.goto(address, timeout=WAIT_MS)
        painted, shown = page.evaluate("window.loaded")
        page.close()
        return painted, shown

    took = []
    kept = fresh()
    if load.is_cached:
        once(kept)
    for _ in range(count):
        context = kept if load.is_cached else fresh()
        took.append(once(context))
        if context is not kept:
            context.close()
    kept.close()
    return took


def main(arguments: argparse.Namespace) -> int:
    program = os.environ.get("PENSTOCK_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed; PENSTOCK_CHROMIUM may name one")
    loads = (
        Load("list of jobs, nothing cached", "#/", "table.jobs tbody tr", min(ROWS, arguments.jobs)),
        Load("list of jobs, again", "#/", "table.jobs tbody tr", min(ROWS, arguments.jobs), is_cached=True),
        Load("curves of a job, nothing cached", "#/jobs/{job}", ".chart canvas", 1),
    )
    report = Report("The web page", ["load", "first paint ms", "worst", "shown ms", "worst"])
    variables = {"API_KEYS": KEY, "OPEN_LOOPBACK": "false", "RATE_LIMIT": "100000/minute"}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, Front(Path(folder), **variables) as front:
        job = asyncio.run(fill(front.nats.url, arguments.jobs, arguments.updates))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=program, args=FLAGS)
            for load in loads:
                took = times(browser, f"{front.url}/{load.view.format(job=job)}", load, arguments.loads)
                found: dict[str, float] = {}
                for name, values in zip(("paint", "shown"), zip(*took, strict=True), strict=True):
                    found |= {f"{name}_median_ms": median(values), f"{name}_worst_ms": max(values)}
                report.row(load.name, *(f"{value:.0f}" for value in found.values()))
                report.results[load.name] = {**found, "loads": took}
                for name, did in (("paint", "painted"), ("shown", "shown")):
                    is_met = found[f"{name}_worst_ms"] <= GOAL_MS
                    report.check(f"{load.name}: {did} within {GOAL_MS:g} ms, each time", is_met)
            report.results["browser"] = browser.version
            browser.close()
    return report.finish(arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--updates", type=int, default=2000, help=f"of the newest job, with {NUM_METRICS} metrics each")
    parser.add_argument("--loads", type=int, default=10)
    sys.exit(main(parser.parse_args()))
