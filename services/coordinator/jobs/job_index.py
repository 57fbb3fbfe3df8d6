"""In-memory summaries of all jobs in the `jobs` bucket, so that lists and checks need not read every record.

An index first asks the bucket for its newest revision and reads the missing changes, so its result includes every
change stored before the request, by this process or another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from penstock.shared.config.jobs.kinds import trains
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord, Phase
from penstock.shared.protocol.live.interaction import job_mark
from penstock.shared.transport.bus import Entry, KeyValue

__all__ = ["JobEntry", "JobIndex", "decode_stored", "entry_of"]

Order = Literal["asc", "desc"]
"""Ascending or descending order of ids, which is the order of creation."""

logger = logging.getLogger(__name__)

DEFAULT_BYTE_BUDGET = 256 << 20
"""Byte budget of a job whose job file does not set `limits.byte_budget`."""
YIELD_EVERY = 64
"""Number of records that are read before other tasks run."""


class _Origin(msgspec.Struct, frozen=True):
    job: str
    number: int


class _Spec(msgspec.Struct, frozen=True):
    kind: str = "rl"
    metadata: dict[str, str] = {}
    limits: dict[str, Any] = {}


class _Status(msgspec.Struct, frozen=True):
    phase: Phase = "pending"


class _Operation(msgspec.Struct, frozen=True):
    kind: str
    state: str = "pending"


class _Stored(msgspec.Struct, frozen=True):
    """The part of a stored record that lists and checks need."""

    id: str
    name: str
    spec: _Spec
    status: _Status = _Status()
    operations: list[_Operation] = []
    fine_tuning: msgspec.Raw = msgspec.Raw()
    origin: _Origin | None = None


_decoder = msgspec.json.Decoder(_Stored)


class JobEntry(msgspec.Struct, frozen=True, gc=False):
    """A job's summary; ``record`` decodes the whole record.

    The garbage collector does not track entries: they form no cycles, and a collection that traverses ten thousand
    entries would delay a request.
    """

    id: str
    name: str
    kind: str
    phase: Phase
    labels: dict[str, str]
    byte_budget: int
    scales: bool
    """True if the job has a pending request to start or stop workers."""
    fine_tuned: bool
    """True if the job came from `POST /v1/fine_tuning/jobs`."""
    mark: int
    revision: int
    value: bytes
    origin: str = ""
    """`job:ID@NUMBER` of the checkpoint that the job started from; empty: none."""

    @property
    def trains(self) -> bool:
        """True if jobs of this kind have a trainer, a ledger and checkpoints."""
        return trains({"kind": self.kind})

    @property
    def finished(self) -> bool:
        """True if the job is in a terminal phase."""
        return self.phase in TERMINAL_PHASES

    def record(self) -> JobRecord:
        """Return the whole record at this revision. Raises ProtocolError if its bytes do not decode."""
        return decode_stored(self.id, self.value, self.revision)


def decode_stored(key: str, value: bytes, revision: int) -> JobRecord:
    """Decode a stored record. Raises ProtocolError."""
    try:
        record = JobRecord.model_validate_json(value)
    except ValueError as error:
        raise ProtocolError(f"job record '{key}' does not decode: {error}") from None
    return record.model_copy(update={"revision": revision})


def entry_of(key: str, value: bytes, revision: int) -> JobEntry:
    """Decode the summary of a stored record. Raises ProtocolError."""
    try:
        stored = _decoder.decode(value)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"job record '{key}' does not decode: {error}") from None
    return JobEntry(
        id=stored.id, name=stored.name, kind=stored.spec.kind, phase=stored.status.phase, labels=stored.spec.metadata,
        byte_budget=_byte_budget(stored.spec), mark=job_mark(stored.id),
        scales=any(one.kind == "scale" and one.state == "pending" for one in stored.operations),
        fine_tuned=bytes(stored.fine_tuning) not in (b"", b"null"), revision=revision, value=value,
        origin="" if stored.origin is None else f"job:{stored.origin.job}@{stored.origin.number}",
    )  # fmt: skip


def _byte_budget(spec: _Spec) -> int:
    """Return the maximum number of bytes of the job in EXPERIENCE; 0 for a deployment, which stores no groups."""
    return 0 if spec.kind == "serving" else int(spec.limits.get("byte_budget", DEFAULT_BYTE_BUDGET))


class JobIndex:
    """All jobs by id (which sorts by submission time), by name and by phase."""

    def __init__(self, kv: KeyValue) -> None:
        self._kv = kv
        self._entries: dict[str, JobEntry] = {}
        self._deleted: dict[str, int] = {}
        self._ids: list[str] = []
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_phase: dict[str, list[str]] = defaultdict(list)
        self._read_to = 0
        self._reading = asyncio.Lock()

    async def current(self) -> JobIndex:
        """Return the index with every change stored by now. Raises Unavailable."""
        before = self._read_to
        end = await self._kv.end()
        if end != self._read_to:
            async with self._reading:
                if end < before and end < self._read_to:  # another bucket replaced the one that was read
                    self._clear()
                if end > self._read_to:
                    await self._catch_up(end)
        return self

    def _clear(self) -> None:
        self._read_to = 0
        tables: list[dict[str, Any]] = [self._entries, self._deleted, self._by_name, self._by_phase]
        for table in tables:
            table.clear()
        self._ids.clear()

    async def _catch_up(self, end: int) -> None:
        read_to, count = end, 0
        async with contextlib.aclosing(self._kv.changes(after=self._read_to)) as changes:
            async for entry in changes:
                try:
                    self.take(entry)
                except ProtocolError as error:
                    logger.error("%s", error)
                read_to, count = max(read_to, entry.revision), count + 1
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
        self._read_to = read_to

    def take(self, entry: Entry) -> None:
        """Apply a stored change of a job, unless the index has a newer revision of the job."""
        known = self._entries.get(entry.key)
        if entry.revision <= max(known.revision if known else 0, self._deleted.get(entry.key, 0)):
            return
        new = entry_of(entry.key, entry.value, entry.revision) if entry.value is not None else None
        if known is not None:
            self._withdraw(known, new)
        if new is None:
            self._deleted[entry.key] = entry.revision
        else:
            self._enter(new, known)

    def _enter(self, new: JobEntry, known: JobEntry | None) -> None:
        self._entries[new.id] = new
        if known is None:
            insort(self._ids, new.id)
        if known is None or known.name != new.name:
            insort(self._by_name[new.name], new.id)
        if known is None or known.phase != new.phase:
            insort(self._by_phase[new.phase], new.id)

    def _withdraw(self, known: JobEntry, new: JobEntry | None) -> None:
        if new is None:
            del self._entries[known.id]
            _remove(self._ids, known.id)
        if new is None or new.name != known.name:
            _remove(self._by_name[known.name], known.id)
        if new is None or new.phase != known.phase:
            _remove(self._by_phase[known.phase], known.id)

    def get(self, job: str) -> JobEntry | None:
        """Return a job by its id, or None."""
        return self._entries.get(job)

    def all(self) -> list[JobEntry]:
        """Return all jobs, oldest first."""
        return [self._entries[id] for id in self._ids]

    def unfinished(self) -> list[JobEntry]:
        """Return the jobs that are not in a terminal phase, oldest first."""
        phases = (phase for phase in self._by_phase if phase not in TERMINAL_PHASES)
        return [self._entries[id] for id in sorted(itertools.chain.from_iterable(self._by_phase[p] for p in phases))]

    def of_models(self, models: frozenset[str] | None) -> list[JobEntry]:
        """Return the jobs whose name or id is in ``models``, oldest first; all jobs if ``models`` is None."""
        if models is None:
            return self.all()
        found = {id for model in models for id in self._by_name.get(model, ())} | models & self._entries.keys()
        return [self._entries[id] for id in sorted(found)]

    def page(
        self, *, after: str | None, limit: int, order: Order, phase: str | None, name: str | None,
        kind: str | None, labels: Mapping[str, str], models: frozenset[str] | None,
    ) -> list[JobEntry]:  # fmt: skip
        """Return at most ``limit`` jobs that follow the id ``after`` in ascending or descending order of ids, which is
        the order of creation.

        ``phase``, ``name``, ``kind`` and each of ``labels`` (of ``metadata``) filter by equality; ``models`` keeps only
        jobs with one of these names or ids. ``after`` need not exist: it is only a position in the order. The API asks
        for one more job than a page holds, to learn if there is a next page.
        """
        candidates = [self._ids]
        if name is not None:
            candidates.append(self._by_name.get(name, []))
        if phase is not None:
            candidates.append(self._by_phase.get(phase, []))
        if models is not None:
            candidates.append([entry.id for entry in self.of_models(models)])
        ids: Iterable[str] = _past(min(candidates, key=len), after, order)
        found = (self._entries[id] for id in ids)
        found = (e for e in found if phase in (None, e.phase) and name in (None, e.name) and kind in (None, e.kind))
        found = (e for e in found if models is None or not models.isdisjoint((e.name, e.id)))
        return list(itertools.islice((e for e in found if labels.items() <= e.labels.items()), limit))


def _past(ids: list[str], after: str | None, order: Order) -> Iterator[str]:
    """Iterate over those of the sorted ``ids`` that follow ``after`` in ascending or descending ``order``, without
    copying the list."""
    if order == "asc":
        places = range(0 if after is None else bisect_right(ids, after), len(ids))
    else:
        places = range((len(ids) if after is None else bisect_left(ids, after)) - 1, -1, -1)
    return (ids[place] for place in places)


def _remove(ids: list[str], id: str) -> None:
    del ids[bisect_left(ids, id)]
