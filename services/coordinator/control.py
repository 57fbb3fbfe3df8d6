"""The coordinator behind the HTTP API: reads from the streams, writes job records, asks the runners."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import xxhash

from penstock.services.coordinator.api.control import Order, Row
from penstock.services.coordinator.api.logfiles import read_logs
from penstock.services.coordinator.audit import audit_group, audit_ledger, sealed_by_seq
from penstock.services.coordinator.checkpoints import checkpoint_row, checkpoint_rows, find_file
from penstock.services.coordinator.journal import Journal, read_snapshots
from penstock.services.coordinator.leader import Leader
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.members import Members
from penstock.services.coordinator.samples import choose_samples, sample_rows
from penstock.services.coordinator.series import columns
from penstock.services.coordinator.store import JobStore
from penstock.services.coordinator.submission import plan_job, resolve_model
from penstock.shared.config.job import JobConfig
from penstock.shared.config.kinds import AnyJob, job_model, parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Conflict, PenstockError, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import BatchSealed, BatchTrained, decode_events
from penstock.shared.protocol.ids import new_attempt
from penstock.shared.protocol.jobs import TERMINAL_PHASES, DesiredState, JobRecord
from penstock.shared.protocol.messages import Ack, ReplayRequest, ReplayRow
from penstock.shared.protocol.trajectory import GroupHeader, decode_group, parse_group_header
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import durability

__all__ = ["CoordinatorControl"]

REPLAY_ROW_DEADLINE_S = 120.0
AUDIT_CHUNK = 256


class CoordinatorControl:
    """Implements ``api.control.Control``."""

    def __init__(
        self, bus: Bus, store: JobStore, members: Members, runners: Mapping[str, Leader], settings: ServiceSettings
    ) -> None:
        self.bus, self.store, self.members, self.runners, self.settings = bus, store, members, runners, settings

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
        await self.store.get(job)
        return await Journal(self.bus, job).load()

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
            groups = [decode_group(messages[g.seq].data) for g in batch.groups if g.seq in messages]
            rows += sample_rows(number, groups)
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
        rows = {row["id"]: row for m in messages.values() for row in sample_rows(0, [decode_group(m.data)])}
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
        sealed: dict[int, BatchSealed] = {}
        trained: dict[int, BatchSealed] = {}
        for message in await self.bus.read(subjects.LEDGER, subjects.ledger(job)):
            for event in decode_events(message.data):
                if isinstance(event, BatchSealed):
                    sealed[event.number] = event
                elif isinstance(event, BatchTrained):
                    trained[event.number] = sealed[event.number]
        return trained

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
        audit = audit_ledger([decode_events(message.data) for message in messages], config, folds)
        wanted = sealed_by_seq(audit)
        for chunk in _chunks(sorted(wanted)):
            found = await self.bus.get_whole(subjects.EXPERIENCE, chunk)
            for seq in chunk:
                number, sealed = wanted[seq]
                if seq not in found:
                    audit.groups_gone += 1
                    continue
                data = found[seq].data
                audit_group(audit, number, sealed, decode_group(data), xxhash.xxh3_128_hexdigest(data))
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


def _chunks(seqs: list[int]) -> list[list[int]]:
    return [seqs[i : i + AUDIT_CHUNK] for i in range(0, len(seqs), AUDIT_CHUNK)]


def is_last_event(data: bytes) -> bool:
    """Whether an event says that its job reached a terminal phase."""
    row = msgspec.json.decode(data)
    return row["type"] == "phase" and str(row["message"]).split(":")[0] in TERMINAL_PHASES
