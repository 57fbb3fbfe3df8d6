"""Pictures of the page for the manual, taken in a real browser of a deployment that is started for them.

    python docs/screenshots.py    write docs/dashboard/VIEW-SIZE-SCHEME.png and docs/dashboard/structure.json anew

Needs Chromium (``PENSTOCK_CHROMIUM`` may name it). Every picture is a PNG of at most 256 colours. ``structure.json``
has the headings, fields, buttons and columns that were on each picture; a test compares them with the page as it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from playwright.sync_api import Page, sync_playwright

from penstock.cli.demo.agent import Agent, agent_clients, demonstrations
from penstock.client import Client

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "dashboard"
WAIT_S = 600.0
SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
SETTLE_MS = 1500
VIEWS = {
    "jobs": ("#/", "table.jobs a"),
    "overview": ("#/jobs/{job}", ".chart canvas"),
    "metrics": ("#/jobs/{job}/metrics", ".chart canvas"),
    "compare": ("#/compare?jobs={job},{other}", ".chart canvas"),
    "samples": ("#/jobs/{job}/samples", ".tokens .token"),
    "workers": ("#/jobs/{job}/workers", ".span.train"),
    "checkpoints": ("#/jobs/{job}/checkpoints", "td.number"),
    "feedback": ("#/jobs/{live}/feedback", "main .figures"),
    "submit": ("#/submit", "textarea"),
    "audit": ("#/deployment/audit", "td code"),
}
STRUCTURE = """(names) => {
  const main = document.querySelector("main");
  const plain = (text) => names.reduce((found, name) => found.replaceAll(name, "JOB"), text)
    .replace(/\\b[a-z]+_[0-9a-f]{12,}\\S*/g, "ID").replace(/\\d[\\d.,]*/g, "N").trim();
  const nameOf = (one) => plain(one.getAttribute("aria-label") ?? one.querySelector("label > span")?.textContent
    ?? one.textContent);
  const within = (place, selector) => [...new Set([...place.querySelectorAll(selector)]
    .filter((one) => one.checkVisibility()).map(nameOf))];
  const tables = [...main.querySelectorAll("table[aria-label]")].filter((one) => one.checkVisibility()).map((one) =>
    [one.getAttribute("aria-label"), { columns: within(one, "thead th"), buttons: within(one, "button") }]);
  return {
    tabs: within(main, ".tabs a"),
    headings: within(main, ":is(h1, h2):not(summary *)"),
    fields: within(main, "label:not(table *)").map((text) => text.replace(/ N$/, "")),
    buttons: within(main, ":is(button, a.button):not(table *, .samples > li > button)"),
    tables: Object.fromEntries(tables),
  };
}"""
COME_AND_GO = {"headings": {"Warnings"}, "buttons": {"Show more", "Show older", "Load more", "Clear"}}
"""Parts of a view that depend on how much there is to show."""


def main() -> None:
    """Start a deployment, give it something to show, and take every view in both sizes and colour schemes."""
    program = os.environ.get("PENSTOCK_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no Chromium on this machine; PENSTOCK_CHROMIUM may name one")
    FOLDER.mkdir(exist_ok=True)
    structure: dict[str, Any] = {view: {} for view in VIEWS}
    with tempfile.TemporaryDirectory(prefix="penstock-shots-") as directory, deployment(Path(directory)) as (url, key):
        jobs, names = prepare(url, key, Path(directory))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            for size, viewport in SIZES.items():
                for scheme in ("light", "dark"):
                    context = browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
                    page = context.new_page()
                    log_in(page, url, key)
                    for view in VIEWS:
                        visit(page, url, view, jobs)
                        page.wait_for_timeout(SETTLE_MS)
                        (FOLDER / f"{view}-{size}-{scheme}.png").write_bytes(small_png(page))
                        structure[view][size] = structure_of(page, names)
                    context.close()
            browser.close()
    (FOLDER / "structure.json").write_text(json.dumps(structure, indent=1) + "\n")
    print(f"{sum(path.stat().st_size for path in FOLDER.glob('*.png')):,} bytes in {FOLDER}")


def visit(page: Page, url: str, view: str, jobs: dict[str, str]) -> None:
    """Go to a view of VIEWS, of jobs with the ids ``job``, ``other`` and ``live``, and wait until it is there."""
    address, sign = VIEWS[view]
    page.goto(f"{url}/{address.format(**jobs)}")
    page.wait_for_selector(f"{sign} >> visible=true", timeout=1000 * WAIT_S)


def structure_of(page: Page, names: list[str]) -> dict[str, Any]:
    """Return ``tabs``, ``headings``, ``fields``, ``buttons`` and ``tables`` of the view that a page shows.

    Only what is seen counts, each name once. ``tables``: columns and buttons by name. The ``names`` of jobs, numbers
    and ids are replaced by placeholders, since they belong to what is shown, not to the page.
    """
    found: dict[str, Any] = page.evaluate(STRUCTURE, sorted(names, key=len, reverse=True))
    for part, some in COME_AND_GO.items():
        found[part] = [name for name in found[part] if name not in some]
    return found


@contextmanager
def deployment(directory: Path) -> Iterator[tuple[str, str]]:
    """``penstock up`` in a folder of its own; its address and key."""
    program = [
        str(Path(sys.executable).with_name("penstock")),
        "up",
        "--port",
        "0",
        "--data-dir",
        str(directory / "data"),
    ]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        state = directory / "data" / "up.json"
        wait_for(lambda: state.exists() and json.loads(state.read_text()).get("url"), "the deployment")
        url = json.loads(state.read_text())["url"]
        key = (directory / "data" / "api.key").read_text().strip()
        wait_for(lambda: answers(f"{url}/readyz"), "the services")
        yield url, key
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def prepare(url: str, key: str, directory: Path) -> tuple[dict[str, str], list[str]]:
    """Submit jobs that end in every way, and let an agent judge a served one; ids and names of those in views."""
    addition = yaml.safe_load((ROOT / "examples" / "addition.yaml").read_text())
    live = yaml.safe_load((ROOT / "examples" / "online.yaml").read_text())
    demonstrations(directory / "demonstrations.jsonl")
    live["warm_start"]["data"] = [{"type": "file", "path": str(directory / "demonstrations.jsonl")}]
    with Client(url, api_key=key, retries=10) as client:

        def submit(name: str, **changes: Any) -> str:
            train = addition["train"] | changes.pop("train", {})
            return client.submit({**addition, "name": name, "early_stop": None, "train": train, **changes}).id

        broken = {"scorers": [{"type": "function", "path": "json:loads"}]}
        other = submit("addition-slow", train={"max_updates": 20}, metadata={"sweep": "rate"},
                       optimizer={"learning_rate": 2e-5})  # fmt: skip
        wait_for(lambda: client.get(other).status.finished_at, "the first job")
        failed = submit("broken-reward", reward=broken)
        wait_for(lambda: client.get(failed).status.finished_at, "the job that fails")
        stopped = submit("stopped-by-hand", train={"max_updates": 5000})
        client.cancel(stopped, force=True)
        router = client.submit(live).id
        job = submit("addition", train={"max_updates": 2000}, metadata={"sweep": "rate", "owner": "ana"},
                     checkpoint={"every": 20, "keep": 3})  # fmt: skip
        wait_for(lambda: client.get(job).status.step >= 40, "forty updates")
        wait_for(lambda: client.get(router).status.phase == "running", "the online job")
        asyncio.run(judge(url, key, live["name"], lambda: client.get(router).status.step >= 8))
        jobs = {"job": job, "other": other, "live": router}
        return jobs, [client.get(id).name for id in jobs.values()]


async def judge(url: str, key: str, model: str, enough: Callable[[], bool]) -> None:
    """Let the agent of the online demo ask a model and judge its answers until it has learnt enough from them."""
    async with agent_clients(url, model, [key], each=8) as some:
        agent = Agent(some, random.Random(0))
        running = asyncio.create_task(agent.run())
        await asyncio.to_thread(wait_for, enough, "updates from feedback")
        agent.stopped.set()
        await running


def answers(address: str) -> bool:
    """True if a request succeeds."""
    try:
        return httpx.get(address).is_success
    except httpx.TransportError:
        return False


def wait_for(true: Callable[[], object], what: str) -> None:
    """Look until something is true. Raises TimeoutError."""
    end = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.5)


def log_in(page: Page, url: str, key: str) -> None:
    """Give the page its key."""
    page.goto(url)
    page.wait_for_selector("#ask-key[open]")
    page.fill("#key-text", key)
    page.keyboard.press("Enter")


def small_png(page: Page) -> bytes:
    """The picture of a page as a PNG with a palette: the most frequent colours, others by the nearest."""
    raw = page.screenshot(type="png")
    rgb_HW3 = pixels(raw)
    coarse_N = (rgb_HW3.reshape(-1, 3) >> 2).astype(np.int64) @ np.array([1 << 12, 1 << 6, 1])
    known, place_N, counts = np.unique(coarse_N, return_inverse=True, return_counts=True)
    chosen = np.sort(known[np.argsort(-counts)[:256]])
    palette_K3 = np.stack([(chosen >> 12) & 63, (chosen >> 6) & 63, chosen & 63], 1)
    known_M3 = np.stack([(known >> 12) & 63, (known >> 6) & 63, known & 63], 1)
    nearest_M = np.array([np.abs(palette_K3 - colour).sum(1).argmin() for colour in known_M3], np.uint8)
    index_HW = nearest_M[place_N].reshape(rgb_HW3.shape[:2])
    exact_K3 = np.zeros((len(chosen), 3), np.uint8)
    for place, colour in enumerate(chosen):  # the true colour of the first pixel that has it
        exact_K3[place] = rgb_HW3.reshape(-1, 3)[np.argmax(coarse_N == colour)]
    height, width = index_HW.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), index_HW], 1)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)), (b"PLTE", exact_K3.tobytes()),
             (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def pixels(png: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """RGB of a PNG as Chromium writes it (8 bits, no interlacing), uint8 [height, width, 3]."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    depth = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * depth)
    found = np.zeros((height, width * depth), np.uint8)
    above = np.zeros(width * depth, np.int64)
    for row in range(height):
        above = unfiltered(int(lines[row, 0]), lines[row, 1:].astype(np.int64), above, depth)
        found[row] = above
    return found.reshape(height, width, depth)[..., :3]


def unfiltered(kind: int, line: Any, above: Any, depth: int) -> Any:
    """One line of a PNG from its filter (PNG specification, section 9) and the line above."""
    if kind == 0:
        return line
    if kind == 2:
        return (line + above) & 255
    if kind == 1:
        return (line.reshape(-1, depth).cumsum(0) & 255).reshape(-1)
    found = line.copy()
    for at in range(len(line)):
        left, up, corner = (
            (found[at - depth] if at >= depth else 0),
            above[at],
            (above[at - depth] if at >= depth else 0),
        )
        if kind == 3:
            guess = (left + up) // 2
        else:
            guess = min(
                (abs(up - corner), 0, left), (abs(left - corner), 1, up), (abs(left + up - 2 * corner), 2, corner)
            )[2]
        found[at] = (line[at] + guess) & 255
    return found


if __name__ == "__main__":
    main()
