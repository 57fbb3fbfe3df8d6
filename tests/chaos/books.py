"""Checks once the faults are over: audits, replays, acknowledged feedback, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from penstock.client import Client
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Admitted, BatchTrained, Dropped, Event, LineageForked, decode_events
from penstock.shared.protocol.live.interaction import Erasure, FeedbackBatch, FeedbackIds, StatusBatch
from penstock.shared.runtime.ledger import ledger_archive, read_ledger
from penstock.shared.transport.bus import Bus
from tests.chaos.deployment import Deployment

__all__ = [
    "FeedbackBooks",
    "JobSummary",
    "check_feedback",
    "check_job",
    "left_behind",
    "open_files",
    "unexplained_forks",
]

ERASED = "erased"
"""Reason of draws whose users' data was deleted, and of a fork that follows from that."""
LAST = ("trained", "rejected", "expired", "retracted")
"""Fates that no other follows."""


@dataclass
class JobSummary:
    """One job after the faults; ``flaws`` are what must not be."""

    job: str
    name: str
    phase: str = ""
    step: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    forks: list[str] = field(default_factory=list)
    replayed: int = 0
    notes: list[str] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(self.dropped.items())) or "none"
        lines = [f"{self.name:<8} {self.phase}, {self.step} updates, {self.replayed} replayed; dropped: {dropped}"]
        lines += [f"    fork: {fork}" for fork in self.forks] + [f"    note: {note}" for note in self.notes]
        lines += [f"    FLAW: {flaw}" for flaw in self.flaws]
        return "\n".join(lines)


def check_job(deployment: Deployment, job: str, *, deletions: bool) -> JobSummary:
    """Audit and replay of one job that is over; ``deletions``: what some users said was deleted meanwhile."""
    client: Client = deployment.client
    record = client.get(job)
    status = record.status
    found = JobSummary(job, record.name, status.phase, status.step or 0, dict(status.draws["dropped"]))
    if status.phase != "succeeded":
        found.flaws.append(f"{status.phase}: {status.message}")
    audit = client.audit(job)
    found.flaws += [f"audit: {flaw}" for flaw in audit["violations"]]
    events = _events(deployment, job)
    found.forks = [f"from batch {one.from_batch} to version {one.version}: {one.reason}" for one in forks_of(events)]
    for fork in unexplained_forks(events, damaged=job in deployment.damaged):
        found.flaws.append(f"forked without a cause that was made: {fork.reason}")
    if status.phase == "succeeded":
        _check_replay(client, found, deletions=deletions)
    return found


def forks_of(events: Iterable[Event]) -> list[LineageForked]:
    """The forks of a ledger."""
    return [event for event in events if isinstance(event, LineageForked)]


def unexplained_forks(events: list[Event], *, damaged: bool) -> list[LineageForked]:
    """Forks that no fault explains: all but those of a job with a ``damaged`` checkpoint that say `erased`, and whose
    erased draws are dropped for that reason before anything else is trained."""
    found = []
    for place, fork in enumerate(events):
        if isinstance(fork, LineageForked):
            after = itertools.takewhile(lambda event: not isinstance(event, BatchTrained), events[place:])
            dropped = any(isinstance(event, Dropped) and event.reason == ERASED for event in after)
            if not (damaged and dropped and fork.reason.startswith(f"{ERASED}:")):
                found.append(fork)
    return found


def _check_replay(client: Client, found: JobSummary, *, deletions: bool) -> None:
    """Every update that can be repeated gives the same bits; a deletion takes the log of what it trained with it."""
    rows = list(client.replay(found.job))
    found.replayed = sum(row.get("match") is True for row in rows)
    if any(row.get("match") is False for row in rows):
        found.flaws.append(f"replay: other bits: {[row for row in rows if row.get('match') is False][:2]}")
    last = rows[-1] if rows else {"summary": "no rows"}
    if deletions and "is gone" in last["summary"]:
        found.notes.append(f"replay ends early, after deletions: {last['summary']}")
    elif not last.get("ok"):
        found.flaws.append(f"replay: {last['summary']}")


def _events(deployment: Deployment, job: str) -> list[Event]:
    entries = deployment.on_bus(lambda bus: read_ledger(bus, job, ledger_archive(deployment.data_dir)))
    return [event for entry in entries for event in decode_events(entry.data)]


def check_feedback(deployment: Deployment, job: str, acked: dict[str, str]) -> tuple[Counter[str], list[str]]:
    """Where each acknowledged item of a job that is over is, counted; and what is wrong with some."""

    async def read(bus: Bus) -> FeedbackBooks:
        posts = await bus.read(subjects.FEEDBACK, subjects.feedback(job))
        kept = await bus.read(subjects.FEEDBACK, subjects.feedback_ids(job))
        erased = await bus.read(subjects.FEEDBACK, subjects.erasures(job))
        fates = await bus.read(subjects.DECISIONS, subjects.decisions(job))
        return FeedbackBooks(
            stream={item.id for message in posts for item in unpack(message.data, FeedbackBatch)[0].items},
            ids={item.id: seq for message in kept for seq, item in unpack(message.data, FeedbackIds)[0].items(job)},
            deletion={id for message in erased for id in unpack(message.data, Erasure)[0].feedback},
            decision=newest_fates(message.data for message in fates),
        )

    books = deployment.on_bus(read)
    for event in _events(deployment, job):
        if isinstance(event, Admitted):
            books.decided_below = event.low_feedback
            books.ledger.update(id for admission in event.admissions for id in admission.feedback)
    bare = {id.removeprefix("fb_"): id for id in acked}
    wrong, status = [], deployment.client.feedback_status  # also knows what came after the end, which nobody decides
    undecided = {id for id in books.undecided(bare.keys()) if status(bare[id]).status not in LAST}
    for found, how in ((books.lost(bare.keys()), "nowhere"), (undecided, "undecided for good")):
        shown = "; ".join(f"{id} of {acked[bare[id]]}" for id in sorted(found)[:5])
        wrong += [f"{len(found)} of {len(acked)} acknowledged items of feedback are {how}: {shown}"] if found else []
    return books.count(bare.keys()), wrong


def newest_fates(messages: Iterable[bytes]) -> dict[str, str]:
    """Status of each item by the newest word of DECISIONS; what a leader says after its successor does not count."""
    found, newest = dict[str, str](), 0
    for data in messages:
        batch, envelope = unpack(data, StatusBatch)
        if envelope.epoch >= newest or not envelope.epoch:
            newest = max(newest, envelope.epoch)
            found |= {fate.feedback: fate.status for fate in batch.items if not fate.revision}
    return found


@dataclass
class FeedbackBooks:
    """Feedback that the streams of one job report, by id; ``ids`` are those that the job knows without their items.

    ``decided_below`` is the sequence in FEEDBACK below which the ledger says that everything is decided.
    """

    stream: set[str]
    ids: dict[str, int]
    deletion: set[str]
    decision: dict[str, str]
    ledger: set[str] = field(default_factory=set)
    decided_below: int = 0

    def count(self, ids: Collection[str]) -> Counter[str]:
        """How many of these each place tells of."""
        places = {name: found for name, found in vars(self).items() if isinstance(found, Collection)}
        return Counter({name: len(set(found).intersection(ids)) for name, found in places.items()})

    def lost(self, ids: Collection[str]) -> set[str]:
        """Those that would be taken anew if they were sent again, or of which nobody knows what became of them."""
        decided = {id for id, seq in self.ids.items() if seq < self.decided_below}
        over = self.ids.keys() & (decided | self.ledger | self.decision.keys())
        return set(ids) - self.stream - self.deletion - over

    def undecided(self, ids: Collection[str]) -> set[str]:
        """Those of which the job, which is over, never told the last fate."""
        return {id for id in set(ids) - self.deletion if self.decision.get(id) not in LAST}


def open_files(deployment: Deployment) -> dict[str, int]:
    """File descriptors of each process that runs."""
    found = {}
    for name, pid in deployment.stack.processes.items():
        with contextlib.suppress(OSError):
            found[name] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found


def left_behind(directory: Path) -> Iterator[str]:
    """Processes that still work in a directory after its deployment was closed, and files in its shared memory."""
    for process in psutil.process_iter(["pid", "cmdline", "name"]):
        if process.pid == os.getpid():
            continue
        told: list[Any] = [*(process.info["cmdline"] or [])]
        with contextlib.suppress(psutil.Error, OSError):
            told += process.environ().values()
        if any(str(directory) in str(word) for word in told) and process.pid not in _ancestors():
            yield f"process {process.pid} ({process.info['name']}): {' '.join(process.info['cmdline'] or [])[:120]}"
    for path in (directory / "shm").iterdir():
        yield f"shared memory: {path.name} ({path.stat().st_size} bytes)"


def _ancestors() -> set[int]:
    return {process.pid for process in psutil.Process().parents()}
