"""Checks after the faults: audits, replays, acknowledged feedback, and processes and files that should be gone."""

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
    "FeedbackRecords",
    "JobSummary",
    "check_feedback",
    "check_job",
    "left_behind",
    "open_files",
    "unexplained_forks",
]

ERASED = "erased"
"""Reason in the ledger of draws whose users deleted their data, and of a fork that follows from that."""
LAST = ("trained", "rejected", "expired", "retracted")
"""Final statuses of feedback."""


@dataclass
class JobSummary:
    """Result of one job after the faults; ``flaws`` lists the failed checks."""

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
    """Check audit, forks and replay of a job that has ended; ``deletions``: users deleted their data meanwhile."""
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
        found.flaws.append(f"forked without a fault that explains it: {fork.reason}")
    if status.phase == "succeeded":
        _check_replay(client, found, deletions=deletions)
    return found


def forks_of(events: Iterable[Event]) -> list[LineageForked]:
    """Return the forks in a ledger."""
    return [event for event in events if isinstance(event, LineageForked)]


def unexplained_forks(events: list[Event], *, damaged: bool) -> list[LineageForked]:
    """Return the forks that no fault explains.

    A fork is explained if a checkpoint of the job was ``damaged``, the reason of the fork is `erased`, and erased draws
    are dropped before the next update.
    """
    found = []
    for index, fork in enumerate(events):
        if isinstance(fork, LineageForked):
            after = itertools.takewhile(lambda event: not isinstance(event, BatchTrained), events[index:])
            dropped = any(isinstance(event, Dropped) and event.reason == ERASED for event in after)
            if not (damaged and dropped and fork.reason.startswith(f"{ERASED}:")):
                found.append(fork)
    return found


def _check_replay(client: Client, found: JobSummary, *, deletions: bool) -> None:
    """Check that each update that can be repeated gives the same bits; after ``deletions`` a replay may end early."""
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
    """Check that no acknowledged feedback of an ended job is lost or undecided; return counts by source, and flaws."""

    async def read(bus: Bus) -> FeedbackRecords:
        posts = await bus.read(subjects.FEEDBACK, subjects.feedback(job))
        kept = await bus.read(subjects.FEEDBACK, subjects.feedback_ids(job))
        erased = await bus.read(subjects.FEEDBACK, subjects.erasures(job))
        statuses = await bus.read(subjects.DECISIONS, subjects.decisions(job))
        return FeedbackRecords(
            stream={item.id for message in posts for item in unpack(message.data, FeedbackBatch)[0].items},
            ids={item.id: seq for message in kept for seq, item in unpack(message.data, FeedbackIds)[0].items(job)},
            deletion={id for message in erased for id in unpack(message.data, Erasure)[0].feedback},
            decision=newest_statuses(message.data for message in statuses),
        )

    records = deployment.on_bus(read)
    for event in _events(deployment, job):
        if isinstance(event, Admitted):
            records.decided_below = event.low_feedback
            records.ledger.update(id for admission in event.admissions for id in admission.feedback)
    bare = {id.removeprefix("fb_"): id for id in acked}
    wrong, status = [], deployment.client.feedback_status  # also knows what came after the end, which nobody decides
    undecided = {id for id in records.undecided(bare.keys()) if status(bare[id]).status not in LAST}
    for found, how in ((records.lost(bare.keys()), "nowhere"), (undecided, "undecided for good")):
        shown = "; ".join(f"{id} of {acked[bare[id]]}" for id in sorted(found)[:5])
        wrong += [f"{len(found)} of {len(acked)} acknowledged items of feedback are {how}: {shown}"] if found else []
    return records.count(bare.keys()), wrong


def newest_statuses(messages: Iterable[bytes]) -> dict[str, str]:
    """Return the newest status of each item in DECISIONS; ignore what a leader reports after its successor."""
    found, newest = dict[str, str](), 0
    for data in messages:
        batch, envelope = unpack(data, StatusBatch)
        if envelope.epoch >= newest or not envelope.epoch:
            newest = max(newest, envelope.epoch)
            found |= {item.feedback: item.status for item in batch.items if not item.revision}
    return found


@dataclass
class FeedbackRecords:
    """Ids of feedback that the streams of one job report; ``ids`` maps those known without their items to a sequence.

    ``decided_below`` is the sequence in FEEDBACK below which everything is decided, according to the ledger.
    """

    stream: set[str]
    ids: dict[str, int]
    deletion: set[str]
    decision: dict[str, str]
    ledger: set[str] = field(default_factory=set)
    decided_below: int = 0

    def count(self, ids: Collection[str]) -> Counter[str]:
        """Return how many of ``ids`` each source reports."""
        places = {name: found for name, found in vars(self).items() if isinstance(found, Collection)}
        return Counter({name: len(set(found).intersection(ids)) for name, found in places.items()})

    def lost(self, ids: Collection[str]) -> set[str]:
        """Return the lost ids: the job would accept them again as new, or no source reports a decision on them."""
        decided = {id for id, seq in self.ids.items() if seq < self.decided_below}
        settled = self.ids.keys() & (decided | self.ledger | self.decision.keys())
        return set(ids) - self.stream - self.deletion - settled

    def undecided(self, ids: Collection[str]) -> set[str]:
        """Return the ids for which the job, which has ended, never reported a final status."""
        return {id for id in set(ids) - self.deletion if self.decision.get(id) not in LAST}


def open_files(deployment: Deployment) -> dict[str, int]:
    """Return the number of open file descriptors of each running process."""
    found = {}
    for name, pid in deployment.stack.processes.items():
        with contextlib.suppress(OSError):
            found[name] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found


def left_behind(directory: Path) -> Iterator[str]:
    """Yield processes that still use a directory after its deployment was closed, and files in its shared memory."""
    for process in psutil.process_iter(["pid", "cmdline", "name"]):
        if process.pid == os.getpid():
            continue
        words: list[Any] = [*(process.info["cmdline"] or [])]
        with contextlib.suppress(psutil.Error, OSError):
            words += process.environ().values()
        if any(str(directory) in str(word) for word in words) and process.pid not in _ancestors():
            yield f"process {process.pid} ({process.info['name']}): {' '.join(process.info['cmdline'] or [])[:120]}"
    for path in (directory / "shm").iterdir():
        yield f"shared memory: {path.name} ({path.stat().st_size} bytes)"


def _ancestors() -> set[int]:
    return {process.pid for process in psutil.Process().parents()}
