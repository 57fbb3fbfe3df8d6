"""The coordinator behind the HTTP API: reads from the streams, writes job records, asks the runners."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from penstock.services.coordinator.api.control import Order, Row
from penstock.services.coordinator.api.logfiles import read_logs
from penstock.services.coordinator.audit import Audit, audit_group, audit_ledger, sealed_by_seq
from penstock.services.coordinator.checkpoints import checkpoint_row, checkpoint_rows, find_file
from penstock.services.coordinator.journal import Journal, read_snapshots
from penstock.services.coordinator.leader import Leader
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.members import Members
from penstock.services.coordinator.samples import choose_samples, sample_rows
from penstock.services.coordinator.series import columns
from penstock.services.coordinator.store import JobStore
from penstock.services.coordinator.submission import plan_job, resolve_model
from penstock.shared.config.job import JobConfig, group_bytes
from penstock.shared.config.kinds import AnyJob, job_model, parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Conflict, PenstockError, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import BatchSealed, BatchTrained, SealedGroup, decode_events
from penstock.shared.protocol.ids import new_attempt
from penstock.shared.protocol.jobs import TERMINAL_PHASES, DesiredState, JobRecord
from penstock.shared.protocol.messages import Ack, ReplayRequest, ReplayRow
from penstock.shared.protocol.trajectory import GroupHeader, decode_group, parse_group_header
from penstock.shared.transport.bus import Bus, Message
from penstock.shared.transport.server import durability

__all__ = ["CoordinatorControl"]

REPLAY_ROW_DEADLINE_S = 120.0
AUDIT_CHUNK_BYTES = 64 << 20
"""The audit holds groups of at most this many bytes at once, or a single one."""
KEPT_STATES = 8
"""Finished jobs whose fold is kept in memory: every part of a download asks for it."""


class CoordinatorControl:
    """Implements ``api.control.Control``."""

    def __init__(
        self, bus: Bus, store: JobStore, members: Members, runners: Mapping[str, Leader], settings: ServiceSettings
    ) -> None:
        self.bus, self.store, self.members, self.runners, self.settings = bus, store, members, runners, settings
        self._finished: OrderedDict[str, LedgerState] = OrderedDict()
        self._folding = asyncio.Lock()

    # -- jobs --------------------------------------------------------------------------------------------------------

    async def submit(self, spec: AnyJob, raw: Row) -> JobRecord:
        """See ``Control.submit``."""
        spec = await resolve_model(spec, self._state)
        await self._plan(spec)
        return await self.store.create(spec)

    async def dry_run(self, spec: AnyJob) -> Row:
        """See ``Control.dry_run``."""
        return await self._plan(await resolve_model(spec, self._state))

    async def _plan(self, spec: AnyJob) -> Row:
        return await plan_job(spec, await self.store.list_all(), experience_bytes=self.settings.experience_bytes)

    async def _state(self, job: str) -> LedgerState:
        """The fold of the job's ledger, to read only. A finished job has one for good and no snapshots any more."""
        record = await self.store.get(job)
        if record.status.phase not in TERMINAL_PHASES:
            return await Journal(self.bus, job).load()
        async with self._folding:
            state = self._finished.pop(job, None) or await Journal(self.bus, job).load()
            if state.finished:
                self._finished[job] = state
            while len(self._finished) > KEPT_STATES:
                self._finished.popitem(last=False)
        return state

    async def get(self, job: str) -> JobRecord:
        """See ``Control.get``."""
        return await self.store.get(job)

    async def list_jobs(
        self, *, after: str | None, limit: int, order: Order, phase: str | None, name: str | None
    ) -> list[JobRecord]:
        """See ``Control.list_jobs``."""
        records = await self.store.list_all()
        if order == "desc":
            records.reverse()
        if after is not None:
            records = [r for r in records if (r.id > after if order == "asc" else r.id < after)]
        records = [r for r in records if phase in (None, r.status.phase) and name in (None, r.name)]
        return records[:limit]

    async def set_desired(self, job: str, state: DesiredState, *, force: bool = False) -> JobRecord:
        """See ``Control.set_desired``."""
        return await self.store.set_desired(job, state, force=force)

    # -- events, metrics, samples ------------------------------------------------------------------------------------

    async def events(self, job: str, *, after: int, limit: int) -> list[tuple[int, Row]]:
        """See ``Control.events``."""
        await self.store.get(job)
        messages = await self.bus.read(subjects.EVENTS, subjects.events(job), start_seq=after + 1)
        return [(m.seq, msgspec.json.decode(m.data)) for m in messages[:limit]]

    async def follow_events(self, job: str, *, after: int) -> AsyncIterator[tuple[int, Row]]:
        """See ``Control.follow_events``."""
        record = await self.store.get(job)
        last = await self.bus.last(subjects.EVENTS, subjects.events(job))
        over = record.status.phase in TERMINAL_PHASES or (last is not None and is_last_event(last.data))
        if over:
            for item in await self.events(job, after=after, limit=1_000_000):
                yield item
            return
        async with contextlib.aclosing(
            self.bus.follow(subjects.EVENTS, subjects.events(job), start_seq=after + 1)
        ) as messages:
            async for message in messages:
                yield message.seq, msgspec.json.decode(message.data)
                if is_last_event(message.data):
                    return

    async def metrics(
        self, job: str, *, names: list[str] | None, step_from: int | None, step_to: int | None, max_points: int
    ) -> Row:
        """See ``Control.metrics``."""
        await self.store.get(job)
        messages = await self.bus.read(subjects.METRICS, subjects.metrics(job))
        rows = [msgspec.json.decode(message.data) for message in messages]
        return columns(rows, names=names, step_from=step_from, step_to=step_to, max_points=max_points)

    async def workers(self, job: str) -> list[Row]:
        """See ``Control.workers``."""
        await self.store.get(job)
        return self.members.rows(job, time.monotonic())

    async def samples(
        self, job: str, *, step: int | None, limit: int, sort: str | None, after: str | None
    ) -> list[Row]:
        """See ``Control.samples``."""
        if job_model((await self.store.get(job)).spec) is not JobConfig:
            return await self._evaluated_samples(job, limit=limit, sort=sort, after=after)
        batches = await self._trained_batches(job)
        rows: list[Row] = []
        steps = [step] if step is not None else sorted(batches, reverse=True)
        for number in steps:
            batch = batches.get(number)
            if batch is None:
                continue
            messages = await self.bus.get_whole(subjects.EXPERIENCE, [group.seq for group in batch.groups])
            found = [messages[group.seq].data for group in batch.groups if group.seq in messages]
            rows += await asyncio.to_thread(_rows_of, number, found)
            if len(rows) >= limit * 4 or step is not None:
                break
        if sort is not None:
            rows.sort(
                key=lambda row: float(row["reward" if "reward" in sort else "tokens"]), reverse=sort.startswith("-")
            )
        if after is not None:
            rows = list(itertools.dropwhile(lambda row: row["id"] != after, rows))[1:]
        return rows[:limit]

    async def _evaluated_samples(self, job: str, *, limit: int, sort: str | None, after: str | None) -> list[Row]:
        headers: list[tuple[int, GroupHeader]] = []
        for message in await self.bus.read(subjects.EXPERIENCE, subjects.experience(job), headers_only=True):
            with contextlib.suppress(ProtocolError):
                headers.append((message.seq, parse_group_header(message.headers)))
        chosen = choose_samples(headers, sort=sort, after=after, limit=limit)
        messages = await self.bus.get_whole(subjects.EXPERIENCE, [seq for seq, _ in chosen])
        found = await asyncio.to_thread(_rows_of, 0, [message.data for message in messages.values()])
        rows = {row["id"]: row for row in found}
        return [rows[row_id] for _, row_id in chosen if row_id in rows]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def checkpoints(self, job: str) -> list[Row]:
        """See ``Control.checkpoints``."""
        state = await self._state(job)
        return await asyncio.to_thread(checkpoint_rows, state)

    async def checkpoint(self, job: str, number: int) -> Row:
        """See ``Control.checkpoint``."""
        state = await self._state(job)
        return await asyncio.to_thread(checkpoint_row, state, number)

    async def checkpoint_file(self, job: str, number: int, name: str) -> tuple[Path, str]:
        """See ``Control.checkpoint_file``."""
        state = await self._state(job)
        path, file = await asyncio.to_thread(find_file, state, number, name)
        return path, file.sha256

    async def _trained_batches(self, job: str) -> dict[int, BatchSealed]:
        messages = await self.bus.read(subjects.LEDGER, subjects.ledger(job))
        return await asyncio.to_thread(_trained, [message.data for message in messages])

    # -- diagnosis ---------------------------------------------------------------------------------------------------

    async def why(self, job: str) -> list[Row]:
        """See ``Control.why``."""
        record = await self.store.get(job)
        if record.status.phase in TERMINAL_PHASES:
            return []
        runner = self.runners.get(job)
        if runner is None or not runner.ready:
            holder = await self.bus.kv(subjects.LEASES).get("coordinator")
            return [
                {
                    "waiting_for": "a coordinator to lead this job (recovering, or another replica leads)",
                    "subject": subjects.LEASES,
                    "id": "coordinator",
                    "holder": None if holder is None or not holder.value else holder.value.decode(errors="replace"),
                    "age_s": 0.0,
                }
            ]
        return runner.why()

    async def audit(self, job: str) -> Row:
        """See ``Control.audit``."""
        record = await self.store.get(job)
        config = parse_job(record.spec)
        if not isinstance(config, JobConfig):
            raise Conflict(f"job '{job}' is an evaluation: it has no ledger to check")
        snapshots = await read_snapshots(self.bus, job)  # before the ledger, which then has every entry that they cover
        messages = await self.bus.read(subjects.LEDGER, subjects.ledger(job))
        place = {message.seq: count for count, message in enumerate(messages, 1)}
        folds = {place.get(snapshot.seq, 0): state for snapshot, state, _ in snapshots}
        audit = await asyncio.to_thread(_audit_entries, messages, config, folds)
        wanted = sealed_by_seq(audit)
        for chunk in chunks_of({seq: largest_size(config, group) for seq, (_, group) in sorted(wanted.items())}):
            found = await self.bus.get_whole(subjects.EXPERIENCE, chunk)
            audit.groups_gone += len(chunk) - len(found)
            await asyncio.to_thread(_audit_groups, audit, [(*wanted[seq], m.data) for seq, m in found.items()])
        return audit.report()

    async def logs(self, job: str, *, service: str | None, tail: int, after: str | None) -> Row:
        """See ``Control.logs``."""
        await self.store.get(job)
        folder = self.settings.data_dir / "logs"
        return await asyncio.to_thread(read_logs, folder, job=job, service=service, tail=tail, after=after)

    async def replay(self, job: str, *, from_batch: int | None, to_batch: int | None) -> AsyncIterator[Row]:
        """See ``Control.replay``."""
        if job_model((await self.store.get(job)).spec) is not JobConfig:
            raise Conflict(f"job '{job}' is an evaluation: it trained nothing that could be repeated")
        request = ReplayRequest(id=new_attempt(), from_batch=from_batch, to_batch=to_batch)
        rows: asyncio.Queue[ReplayRow] = asyncio.Queue()

        def take(subject: str, data: bytes) -> None:
            rows.put_nowait(unpack(data, ReplayRow)[0])

        progress = await self.bus.subscribe(subjects.replay_progress(request.id), take)
        try:
            reply = await self.bus.request(subjects.REPLAY, pack(request, job=job), deadline_s=10)
            ack, _ = unpack(reply, Ack)
            if not ack.ok:
                raise Conflict(ack.reason)
            row = ReplayRow()
            while not row.done:
                try:
                    async with asyncio.timeout(REPLAY_ROW_DEADLINE_S):
                        row = await rows.get()
                except TimeoutError:
                    row = ReplayRow(done=True, summary=f"the trainer gave no sign for {REPLAY_ROW_DEADLINE_S:g} s")
                yield msgspec.to_builtins(row)
        finally:
            await progress.close()

    # -- the deployment ----------------------------------------------------------------------------------------------

    async def limits(self) -> Row:
        """See ``Control.limits``."""
        return {
            "durability": await durability(self.settings.nats_monitor_url),
            "experience_bytes": self.settings.experience_bytes,
            "stream_bytes": self.settings.stream_bytes,
        }

    async def health(self) -> tuple[bool, Row]:
        """See ``Control.health``."""
        checks: Row = {
            "nats": {"ok": self.bus.connected, "detail": "connected" if self.bus.connected else "no connection"}
        }
        try:
            async with asyncio.timeout(0.8):
                state = await self.bus.stream_state(subjects.LEDGER)
            checks["ledger"] = {"ok": True, "detail": f"{state.messages} entries"}
        except (PenstockError, TimeoutError) as error:
            checks["ledger"] = {"ok": False, "detail": str(error) or "the ledger stream does not answer"}
        return all(check["ok"] for check in checks.values()), checks


def chunks_of(sizes: Mapping[int, int]) -> list[list[int]]:
    """Cut the keys of ``sizes`` (key -> bytes), in order, into runs of at most AUDIT_CHUNK_BYTES, or of one key."""
    chunks: list[list[int]] = []
    room = 0
    for key, nbytes in sizes.items():
        if not chunks or nbytes > room:
            chunks.append([])
            room = AUDIT_CHUNK_BYTES
        chunks[-1].append(key)
        room -= nbytes
    return chunks


def largest_size(config: JobConfig, group: SealedGroup) -> int:
    """Upper bound of a stored group with as many tokens as the ledger says, in bytes."""
    tokens = config.data.prompt.max_tokens + group.tokens
    return group_bytes(tokens, config.completions_per_group, 0, table_bytes=config.model.replay_bytes_per_token)


def _audit_entries(messages: Sequence[Message], config: JobConfig, folds: Mapping[int, LedgerState]) -> Audit:
    return audit_ledger([decode_events(message.data) for message in messages], config, folds)


def _audit_groups(audit: Audit, found: Sequence[tuple[int, SealedGroup, bytes]]) -> None:
    for number, sealed, data in found:
        audit_group(audit, number, sealed, decode_group(data), xxhash.xxh3_128_hexdigest(data))


def _rows_of(step: int, found: Sequence[bytes]) -> list[Row]:
    return sample_rows(step, [decode_group(data) for data in found])


def _trained(entries: Sequence[bytes]) -> dict[int, BatchSealed]:
    sealed: dict[int, BatchSealed] = {}
    trained: dict[int, BatchSealed] = {}
    for event in (event for data in entries for event in decode_events(data)):
        if isinstance(event, BatchSealed):
            sealed[event.number] = event
        elif isinstance(event, BatchTrained):
            trained[event.number] = sealed[event.number]
    return trained


def is_last_event(data: bytes) -> bool:
    """Whether an event says that its job reached a terminal phase."""
    row = msgspec.json.decode(data)
    return row["type"] == "phase" and str(row["message"]).split(":")[0] in TERMINAL_PHASES
