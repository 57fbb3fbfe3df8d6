"""Diagnosis of a job: what it waits for, its workers and their logs, the audit of its ledger, and replays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.leader_rpc import LeaderRpc
from penstock.services.coordinator.leader.weight_routes import transports_of
from penstock.services.coordinator.leader.why import wait_row
from penstock.services.coordinator.ledger_room import describe_ledger, is_filling
from penstock.services.coordinator.queries.admission_audit import audit_admissions
from penstock.services.coordinator.queries.audit import Audit, audit_entries, audit_stored, sealed_by_seq
from penstock.services.coordinator.queries.logfiles import read_logs
from penstock.services.coordinator.queries.replays import replay_rows
from penstock.services.coordinator.training.journal import read_snapshots
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import group_bytes
from penstock.shared.config.jobs.kinds import AnyTraining, parse_job, trains
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ArchiveError, Conflict
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import SealedGroup, decode_events
from penstock.shared.protocol.jobs import TERMINAL_PHASES
from penstock.shared.runtime.ledger import LedgerArchive, read_ledger
from penstock.shared.transport.bus import Bus

__all__ = ["Diagnosis", "chunks_of", "largest_size"]

Row = dict[str, Any]

AUDIT_CHUNK_BYTES = 64 << 20
"""Maximum number of bytes of groups that the audit holds in memory at once. A group that is larger is held alone."""


class Diagnosis:
    """Explains and checks a job. Every method raises NotFound (unknown job) and may raise Unavailable.

    Args:
        logs: directory of the services' log files.
    """

    def __init__(
        self, bus: Bus, store: JobStore, members: Members, *, leader: LeaderRpc, archive: LedgerArchive, logs: Path
    ) -> None:
        self._bus, self._store, self._members, self._leader = bus, store, members, leader
        self._archive, self._logs = archive, logs

    async def why(self, job: str) -> list[Row]:
        """Return what the job waits for now, most important first; empty if it waits for nothing.

        A row has ``waiting_for`` (a phrase), ``subject``, ``id``, ``holder`` (worker or None) and ``age_s``. If the
        stream LEDGER fills up, the last row says so; jobs continue until it is full.
        """
        record = await self._store.get(job)
        if record.status.phase in TERMINAL_PHASES:
            return []
        waits = await self._leader.why(job)
        ledger = await self._bus.stream_state(subjects.LEDGER)
        if is_filling(ledger):
            text = f"soon: room in the ledger. {describe_ledger(ledger)}"
            waits = [*waits, wait_row(text, subjects.LEDGER, subjects.LEDGER)]
        return waits

    async def workers(self, job: str, *, history: bool = False) -> list[Row]:
        """Return one row per live or recently lost worker of the deployment.

        A row has ``service``, ``worker``, ``host``, ``pid``, ``ready``, ``age_s`` (of the last heartbeat), ``alive``,
        and the heartbeat's entry for this job (``version``, ``running``, ``waiting_for``, ``since``, ...). ``history``:
        add ``spans``, the states of the worker in the last minutes.
        """
        await self._store.get(job)
        clock = time.monotonic()
        chosen = transports_of(job, self._members, clock)
        return [
            row | ({"chosen_transport": chosen[row["worker"]]} if row["worker"] in chosen else {})
            for row in self._members.rows(job, clock, history=history)
        ]

    async def logs(self, job: str, *, service: str | None, tail: int, after: str | None, unnamed: bool) -> Row:
        """Return ``{"lines": [{"service", "worker", "text"}], "next": cursor}``; see ``read_logs``.

        The lines are the last ``tail`` ones of each log file, or those after the cursor of an earlier reply. The
        cursor is opaque to the API.
        """
        await self._store.get(job)
        return await asyncio.to_thread(
            read_logs, self._logs, job=job, service=service, tail=tail, after=after, unnamed=unnamed
        )

    async def audit(self, job: str) -> Row:
        """Check that the job's ledger is consistent, and that the ledger agrees with the streams.

        Returns ``{"ok": bool, "equation": {...}, "checks": [{"name", "ok", "detail"}], "violations": [str]}``.

        Raises:
            Conflict: the job does not train, so it has no ledger.
        """
        record = await self._store.get(job)
        config = parse_job(record.spec)
        if not isinstance(config, AnyTraining):
            raise Conflict(f"job '{job}' is of kind '{config.kind}': it has no ledger to check")
        snapshots = await read_snapshots(self._bus, job)  # before the ledger, which has every entry that they cover
        try:
            messages = await read_ledger(self._bus, job, self._archive)
        except ArchiveError as error:
            flawed = Audit()
            flawed.find("archive", str(error))
            return flawed.report()
        place = {message.seq: count for count, message in enumerate(messages, 1)}
        folds = {place.get(snapshot.seq, 0): state for snapshot, state, _ in snapshots}
        audit = await asyncio.to_thread(audit_entries, [message.data for message in messages], config, folds)
        wanted = sealed_by_seq(audit)
        for chunk in chunks_of({seq: largest_size(config, group) for seq, (_, group) in sorted(wanted.items())}):
            found = await self._bus.get_whole(subjects.EXPERIENCE, chunk)
            audit.groups_gone += len(chunk) - len(found)
            await asyncio.to_thread(_audit_groups, audit, [(*wanted[seq], m.data) for seq, m in found.items()])
        if isinstance(config, OnlineJob):
            entries = await asyncio.to_thread(lambda: [decode_events(message.data) for message in messages])
            audit.decisions_checked, flaws = await audit_admissions(self._bus, job, config, entries)
            for flaw in flaws:
                audit.find("decisions", flaw)
        return audit.report()

    async def replay(
        self, job: str, *, from_batch: int | None, to_batch: int | None, feedback: bool = False
    ) -> AsyncIterator[Row]:
        """Have the trainer repeat sealed batches from a retained checkpoint and compare the results; yield rows of
        progress.

        Rows are ``{"batch", "total", "match", "detail"}``; the last one has ``"done": true``, ``"ok": bool`` and
        ``"summary": str``. With ``feedback`` each row also has ``"admissions"``: its batch's rows of
        ``feedback_by_batch``.

        Raises:
            Conflict: nothing can be replayed now (raised before the first row).
        """
        record = await self._store.get(job)
        if not trains(record.spec):
            raise Conflict(f"job '{job}' is of kind '{record.kind}': it trained nothing that could be repeated")
        wanted = replay_rows(
            self._bus, job, archive=self._archive, from_batch=from_batch, to_batch=to_batch, feedback=feedback
        )
        async with contextlib.aclosing(wanted) as rows:
            async for row in rows:
                yield row


def chunks_of(sizes: Mapping[int, int]) -> list[list[int]]:
    """Split the keys of ``sizes`` (key -> bytes), in order, into lists of at most AUDIT_CHUNK_BYTES. A key with more
    bytes gets a list of its own."""
    chunks: list[list[int]] = []
    room = 0
    for key, nbytes in sizes.items():
        if not chunks or nbytes > room:
            chunks.append([])
            room = AUDIT_CHUNK_BYTES
        chunks[-1].append(key)
        room -= nbytes
    return chunks


def largest_size(config: AnyTraining, group: SealedGroup) -> int:
    """Return an upper bound of the stored bytes of a group, from its token count in the ledger."""
    if isinstance(config, EmbodiedJob):
        return config.max_group_bytes
    tokens = config.data.prompt.max_tokens + group.tokens
    return group_bytes(tokens, config.completions_per_group, 0, table_bytes=config.model.replay_bytes_per_token)


def _audit_groups(audit: Audit, found: Sequence[tuple[int, SealedGroup, bytes]]) -> None:
    for number, sealed, data in found:
        audit_stored(audit, number, sealed, data)
