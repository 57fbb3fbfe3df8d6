"""How soon does a rollout worker that joins a running job contribute, and what is lost when one leaves or is killed?

    python benchmarks/joining.py [--out results.json] [--joins 5] [--long 2]

All services are processes of this machine, beside one small job. A second rollout worker is started again and again.
Once it is ready, the time runs until a batch has a group of it: the worker learns of the job, loads the model, fetches
the weights and generates. While it holds tickets it leaves, by turns by SIGTERM (a drain) and by SIGKILL. Each draw
that the job had made by then must be in a batch afterwards, from whichever worker, and none may be dropped.

The groups of that job end before a drained worker has to leave. Those of a second job take longer: there a drained
worker hands over what it has written, and the tokens that another worker does not go on with are lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop
from report import Report

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions, read_state
from penstock.local.launch import Process, interpreter
from penstock.local.ports import free_ports
from penstock.shared.config.base import with_overrides
from penstock.shared.protocol.events import BatchSealed, Drawn, Dropped, Event, decode_events
from penstock.shared.protocol.ids import Draw
from penstock.shared.runtime.ledger import ledger_archive, read_ledger
from penstock.shared.transport.bus import Bus

T = TypeVar("T")

GOAL_S = 3.0
FIRST, SECOND = "rollout-0", "rollout-joined"
READY_S, WAIT_S = 400.0, 300.0
DRAIN_S = 2.0
"""`PENSTOCK_DRAIN_S` of the second worker beside the job of long completions: its groups get a quarter to end."""
FAST_POLL_S, POLL_S = 0.01, 0.25
_GIVEN = re.compile(r"ticket (train:\d+\S*) is given back: another worker goes on with its (\d+) tokens")
_LOST = re.compile(r"ticket (train:\d+\S*) is given back: its (\d+) tokens are lost")
_CONTINUED = re.compile(r"ticket (train:\d+\S*) goes on with (\d+) tokens")

SHORT: dict[str, Any] = {
    "name": "joining",
    "model": {
        "config": {
            "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "max_position_embeddings": 32,
        },
        "tokenizer": "char",
    },
    "data": {"train": {"type": "addition", "digits": 1}, "prompt": {"max_tokens": 8}},
    "reward": {"scorers": [{"type": "exact"}], "processes": 1},
    "algorithm": {"group_size": 4},
    "sampling": {"max_new_tokens": 6},
    "optimizer": {"learning_rate": 1e-4},
    "train": {"batch_size": 16, "max_updates": 1_000_000, "max_lag": 1},
    "checkpoint": {"every": 1000, "keep": 2},
    "limits": {"byte_budget": 8 << 20},
}  # fmt: skip
LONG = with_overrides(
    SHORT,
    [
        "name=joining-long", "model.config.max_position_embeddings=2048", "sampling.max_new_tokens=1500",
        "sampling.ignore_eos=true", "placement.max_running=8", "limits.byte_budget=33554432", "train.max_lag=4",
    ],
)  # fmt: skip


@dataclass
class Round:
    """One worker that joined and left.

    Attributes:
        ready_s: seconds from its start until it was ready.
        joined_s: seconds from then until the next batch with a group of it was sealed.
        how: how it left: 'drain' or 'kill -9'.
        held: draws that it held when it was told to leave, as its last heartbeat says.
        open: draws of the job that were in no batch then, those that it held among them.
        settled_s: seconds from then until all of them were in batches.
        lost: draws that were dropped in this round.
        handed_over, tokens_lost: tokens that it had written and gave to another worker, and those that none goes on
            with; only a worker that drains knows.
    """

    job: str
    ready_s: float
    joined_s: float
    how: str
    held: int
    open: int
    settled_s: float
    lost: int
    handed_over: int
    tokens_lost: int


@dataclass
class Books:
    """Draws of a job; ``sealed``: worker of each draw that is in a batch, and the time of the batch."""

    drawn: set[Draw] = field(default_factory=set)
    dropped: set[Draw] = field(default_factory=set)
    sealed: dict[Draw, tuple[str, float]] = field(default_factory=dict)

    @property
    def open(self) -> set[Draw]:
        """Draws of which nothing is decided."""
        return self.drawn - self.dropped - self.sealed.keys()


class Deployment:
    """A running stack with one rollout worker, and a second one that comes and goes."""

    def __init__(self, stack: Stack, client: AsyncClient, bus: Bus, data_dir: Path) -> None:
        self.stack, self.client, self.bus, self.data_dir = stack, client, bus, data_dir

    async def events(self, job: str) -> list[Event]:
        """The ledger of a job."""
        entries = await read_ledger(self.bus, job, ledger_archive(self.data_dir))
        return [event for entry in entries for event in decode_events(entry.data)]

    async def books(self, job: str) -> Books:
        """Read the ledger of a job."""
        books = Books()
        for event in await self.events(job):
            if isinstance(event, Drawn):
                books.drawn |= {Draw(ordinal) for ordinal in range(event.start, event.stop)}
            elif isinstance(event, Dropped):
                books.dropped |= set(event.draws)
            elif isinstance(event, BatchSealed):
                books.sealed |= {group.draw: (group.worker, event.time) for group in event.groups}
        return books

    async def held(self, job: str) -> set[str]:
        """Draws in the hands of the second worker."""
        rows = {row["worker"]: row for row in await self.client.workers(job)}
        return set(rows.get(SECOND, {}).get("holds", []))

    def log(self, worker: str) -> str:
        """Return the log of a worker."""
        return (self.data_dir / "logs" / f"{worker}.log").read_text()

    @asynccontextmanager
    async def second(self, **environment: str) -> AsyncIterator[tuple[Process, float]]:
        """Start the second worker; yields its process once it is ready, and the seconds that took."""
        state, port = read_state(self.data_dir), free_ports(1)[0]
        assert state is not None
        own = {
            "PENSTOCK_NATS_URL": state.nats_urls["rollout"], "PENSTOCK_DATA_DIR": state.data_dir,
            "PENSTOCK_WORKER_ID": SECOND, "PENSTOCK_HEALTH_PORT": str(port),
        }  # fmt: skip
        began = time.monotonic()
        with (self.data_dir / "logs" / f"{SECOND}.log").open("wb") as log:
            process = interpreter("penstock.services.rollout", {**os.environ, **own, **environment}, log)
        try:
            async with httpx.AsyncClient(verify=False) as http:
                await until(lambda: is_ready(http, port), f"{SECOND} is ready", every_s=FAST_POLL_S)
            yield process, time.monotonic() - began
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


async def is_ready(http: httpx.AsyncClient, port: int) -> bool:
    """True if the worker with this health port is ready."""
    try:
        return (await http.get(f"http://127.0.0.1:{port}/readyz")).is_success
    except httpx.TransportError:
        return False


async def until(ask: Callable[[], Awaitable[T]], what: str, *, every_s: float = POLL_S) -> T:
    """Ask until the answer is true, and return it. Raises SystemExit after ``WAIT_S``."""
    deadline = time.monotonic() + WAIT_S
    while not (found := await ask()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {WAIT_S:g} s")
        await asyncio.sleep(every_s)
    return found


@asynccontextmanager
async def deployment(data_dir: Path) -> AsyncIterator[Deployment]:
    """Start a stack, and stop it at the end."""
    async with Stack(StackOptions(data_dir=data_dir, environment={"PENSTOCK_API_KEYS": ""})) as stack:
        await stack.ready(deadline_s=READY_S)
        state = read_state(data_dir)
        assert state is not None
        async with (
            AsyncClient(stack.url, api_key=stack.api_key) as client,
            await Bus.connect(state.nats_url, name="bench") as bus,
        ):
            yield Deployment(stack, client, bus, data_dir)


@asynccontextmanager
async def running(on: Deployment, config: dict[str, Any], updates: int) -> AsyncIterator[str]:
    """Submit a job, wait for its first updates, and cancel it at the end."""
    job = (await on.client.submit(config)).id

    async def works() -> bool:
        return (await on.client.get(job)).status.step >= updates

    await until(works, f"update {updates} of {job}")
    try:
        yield job
    finally:
        await on.client.cancel(job, checkpoint=False)
        await on.client.wait(job, timeout_s=WAIT_S)


async def come_and_go(on: Deployment, job: str, how: str, **environment: str) -> Round:
    """One round: join, contribute, leave."""
    before = len(on.log(FIRST))
    async with on.second(**environment) as (process, ready_s):
        ready = time.time()

        async def first() -> float:
            known = (await on.books(job)).sealed.values()
            return min((moment for worker, moment in known if worker == SECOND and moment > ready), default=0.0)

        joined_s = await until(first, f"a group of {SECOND} in a batch") - ready
        held = await until(lambda: on.held(job), f"tickets in the hands of {SECOND}")
        books, left = await on.books(job), time.monotonic()
        os.kill(process.pid, signal.SIGTERM if how == "drain" else signal.SIGKILL)
        code = await asyncio.to_thread(process.wait, WAIT_S)
        if code != (0 if how == "drain" else -signal.SIGKILL):
            raise SystemExit(f"{SECOND} ended with {code}:\n{on.log(SECOND)[-2000:]}")

    async def settled() -> bool:
        return not books.open & (await on.books(job)).open

    await until(settled, f"batches with the draws of the time when {SECOND} left")
    settled_s = time.monotonic() - left
    dropped = (await on.books(job)).dropped - books.dropped
    given, lost = of_tickets(_GIVEN, on.log(SECOND)), of_tickets(_LOST, on.log(SECOND))
    continued = of_tickets(_CONTINUED, on.log(FIRST)[before:])
    tokens_lost = sum(lost.values()) + sum(max(0, num - continued.get(key, 0)) for key, num in given.items())
    return Round(
        job, ready_s, joined_s, how, len(held), len(books.open), settled_s, len(dropped), sum(given.values()),
        tokens_lost,
    )  # fmt: skip


def of_tickets(pattern: re.Pattern[str], log: str) -> dict[str, int]:
    """Number of tokens by ticket in the lines of a log that match."""
    return {key: int(num) for key, num in pattern.findall(log)}


def fill(report: Report, rounds: list[Round]) -> None:
    """A row for each round, and the targets."""
    for one in rounds:
        report.row(
            f"{one.how}, {one.job.partition('-')[0]}", f"{one.ready_s:.1f}", f"{one.joined_s:.2f}", str(one.held),
            str(one.open), f"{one.settled_s:.1f}", str(one.lost), str(one.handed_over), str(one.tokens_lost),
        )  # fmt: skip
    joins = [one.joined_s for one in rounds if one.job == "short"]
    drains = [one for one in rounds if one.how == "drain"]
    if joins:
        median = statistics.median(joins)
        report.results = {"joined_s": {"median": median, "worst": max(joins)}}
        report.check(f"a group in a batch within {GOAL_S:g} s of being ready, each of {len(joins)}",
                     max(joins) <= GOAL_S)  # fmt: skip
    report.check("no draw was lost", not any(one.lost for one in rounds))
    report.check("no token was lost in a drain", not any(one.tokens_lost for one in drains))
    if handed := [one for one in drains if one.job == "long"]:
        report.check("groups that were not done were handed over", all(one.handed_over for one in handed))
    report.results["rounds"] = [asdict(one) for one in rounds]


async def main(arguments: argparse.Namespace) -> int:
    """Exit status."""
    report = Report(
        "A rollout worker that joins and leaves",
        [
            "how, completions",
            "start, s",
            "joined, s",
            "held",
            "open",
            "settled, s",
            "draws lost",
            "tokens handed",
            "tokens lost",
        ],
    )
    rounds: list[Round] = []

    async def one_more(name: str, job: str, how: str, **environment: str) -> None:
        found = await come_and_go(on, job, how, **environment)
        found.job = name
        rounds.append(found)
        print(found, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="penstock-joining-") as scratch:
        async with deployment(Path(scratch)) as on:
            async with running(on, SHORT, 5) as job:
                for number in range(arguments.joins):
                    await one_more("short", job, "kill -9" if number % 2 else "drain")
            if arguments.long:
                async with running(on, LONG, 0) as job:
                    for number in range(arguments.long):
                        how = "kill -9" if number % 2 else "drain"
                        await one_more("long", job, how, PENSTOCK_DRAIN_S=f"{DRAIN_S:g}")
    fill(report, rounds)
    return report.finish(arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--joins", type=int, default=5, help="rounds beside the job of short completions")
    parser.add_argument("--long", type=int, default=2, help="rounds beside the job of long completions")
    sys.exit(uvloop.run(main(parser.parse_args())))
