"""The ledger on the bus: read it, append to it as its one writer, and keep snapshots of its fold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from penstock.services.coordinator.decision import copy_state
from penstock.services.coordinator.ledger import LedgerState, fold
from penstock.services.coordinator.retry import Retry
from penstock.services.coordinator.snapshot import Snapshot, decode_snapshot, digest_of, encode_snapshot
from penstock.shared.errors import ConfigError, Conflict, Fenced, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Event, PhaseChanged, decode_events, encode_events
from penstock.shared.protocol.jobs import JobFailure
from penstock.shared.transport.bus import Bus, Message, Outgoing

__all__ = ["Journal", "read_snapshots"]

logger = logging.getLogger(__name__)

SNAPSHOT_ENTRIES = 256
"""A snapshot is due after this many entries, and after as many bytes of entries as the last snapshot has: snapshots
never write more than the ledger itself, and a leader never reads much more than one of them."""
KEEP = 2
"""Newest snapshots that stay; the older one serves when the newer cannot be verified."""


class Journal:
    """Append-only event log of one job with a single writer.

    An append names the last sequence it knows. A refused or timed-out append is resolved by reading back the tail: the
    own entry there means success, a foreign one means that somebody else leads (Fenced). ``retry``: says what an append
    waits for.
    """

    def __init__(self, bus: Bus, job: str, retry: Retry | None = None) -> None:
        self._bus, self._job = bus, job
        self.retry = retry or Retry(job)
        self._subject = subjects.ledger(job)
        self._last_seq = 0
        self._last_data = b""
        self._entries = self._bytes = self._snapshot_bytes = 0  # since the last snapshot, and its size

    async def load(self) -> LedgerState:
        """The fold of everything that was ever appended: the newest snapshot that can be verified, and what followed.

        A snapshot that cannot be verified is ignored; without one the fold starts at the first entry.
        """
        for snapshot, state, nbytes in await read_snapshots(self._bus, self._job):
            tail = await self._bus.read(subjects.LEDGER, self._subject, start_seq=snapshot.seq)
            if not tail or tail[0].seq != snapshot.seq or digest_of(tail[0].data) != snapshot.entry:
                logger.warning("%s: the snapshot of entry %d is of another ledger; ignored", self._job, snapshot.seq)
                continue
            self._snapshot_bytes = nbytes
            try:
                return await asyncio.to_thread(self._fold, state, tail[1:], tail[0])
            except (AssertionError, KeyError) as error:
                logger.error("%s: the snapshot of entry %d is wrong (%r); ignored", self._job, snapshot.seq, error)
        entries = await self._bus.read(subjects.LEDGER, self._subject)
        return await asyncio.to_thread(self._fold, LedgerState(), entries, None)

    def _fold(self, state: LedgerState, tail: Sequence[Message], last: Message | None) -> LedgerState:
        for message in tail:
            fold(decode_events(message.data), state)
            last = message
        self._entries, self._bytes = len(tail), sum(len(message.data) for message in tail)
        if last is not None:
            self._last_seq, self._last_data = last.seq, last.data
        return state

    def failure(self) -> JobFailure | None:
        """Why the job failed, if the newest entry ended it; a leader that died may not have told."""
        events = decode_events(self._last_data) if self._last_data else []
        for event in events:
            if isinstance(event, PhaseChanged) and event.phase == "failed" and event.code:
                told = {"code": event.code, "message": event.reason, "service": event.service or None}
                return JobFailure.model_validate(told)
        return None

    async def append(self, events: Sequence[Event]) -> int:
        """Commit one decision; returns its sequence. Waits while the bus is away or the ledger has no room (the caller
        is cancelled when it loses its lease).

        Raises:
            Fenced: another writer appended.
        """
        data = encode_events(events)
        seq = await self.retry.until_taken("an entry of the ledger", self._subject, lambda: self._append(data))
        self._last_seq, self._last_data = seq, data
        self._entries, self._bytes = self._entries + 1, self._bytes + len(data)
        return seq

    async def _append(self, data: bytes) -> int:
        try:
            return await self._bus.publish(self._subject, data, expect_last_subject_seq=self._last_seq, deadline_s=5)
        except Conflict as error:
            if seq := await self._resolve(data):
                return seq
            raise Unavailable(f"{error}, and what it wrote cannot be read yet") from None

    async def _resolve(self, data: bytes) -> int:
        """Sequence of the own entry if it is the next one in the tail, 0 if there is none yet."""
        tail = await self._bus.read(subjects.LEDGER, self._subject, start_seq=self._last_seq + 1)
        if not tail:
            return 0
        if tail[0].data == data:
            return tail[0].seq
        raise Fenced(f"{self._subject}: entry {tail[0].seq} was written by somebody else; stepping down")

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, state: LedgerState) -> Callable[[], Awaitable[None]] | None:
        """What writes a snapshot of ``state``, the fold of all that was appended; None while none is due."""
        if self._entries < SNAPSHOT_ENTRIES or self._bytes < self._snapshot_bytes:
            return None
        self._entries = self._bytes = 0
        copy, seq, entry = copy_state(state), self._last_seq, digest_of(self._last_data)
        return lambda: self._write(copy, seq, entry)

    async def _write(self, state: LedgerState, seq: int, entry: str) -> None:
        data = await asyncio.to_thread(encode_snapshot, state, job=self._job, seq=seq, entry=entry)
        self._snapshot_bytes = len(data)
        subject = subjects.snapshots(self._job)
        message = Outgoing(subject, data, msg_id=f"snapshot:{self._job}:{seq}:{state.epoch}")
        try:
            await self._bus.publish_whole([message], deadline_s=10)
        except (ConfigError, ProtocolError) as error:  # too large for this server: leaders fold more
            logger.warning("%s: the snapshot of entry %d is not stored: %s", self._job, seq, error)
            return
        begun = await _begun(self._bus, self._job)
        if len(begun) > KEEP:
            await self._bus.purge(subjects.SNAPSHOTS, subject, below_seq=begun[-KEEP])


async def read_snapshots(bus: Bus, job: str) -> list[tuple[Snapshot, LedgerState, int]]:
    """Snapshots of a job that are sound in themselves, each with its state and its size, the newest first.

    Whether the ledger has the entry that a snapshot names is for the caller to check.
    """
    found = []
    for seq, message in (await bus.get_whole(subjects.SNAPSHOTS, await _begun(bus, job))).items():
        try:
            found.append((*decode_snapshot(message.data, job=job), len(message.data)))
        except ProtocolError as error:
            logger.warning("%s: snapshot %d is ignored: %s", job, seq, error)
    return sorted(found, key=lambda one: one[0].seq, reverse=True)


async def _begun(bus: Bus, job: str) -> list[int]:
    """Sequences at which snapshots begin."""
    return [m.seq for m in await bus.read(subjects.SNAPSHOTS, subjects.snapshots(job), headers_only=True)]
