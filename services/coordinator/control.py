"""Operations behind the HTTP API: read the streams, write job records, call the leaders of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.coordinator.access import AuditLog, KeyStore
from penstock.services.coordinator.deployments import Deployments
from penstock.services.coordinator.files import FileStore
from penstock.services.coordinator.finetuning.service import FineTuningService
from penstock.services.coordinator.graders import GraderBench
from penstock.services.coordinator.jobs.environments import describe_environment
from penstock.services.coordinator.jobs.job_index import JobEntry, Order
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.removal import delete_job
from penstock.services.coordinator.jobs.scaling import Scaler
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.dead_letters import DeadLetterQueue
from penstock.services.coordinator.leader.leader_rpc import Leader, LeaderRpc
from penstock.services.coordinator.leader.weight_routes import transports_of
from penstock.services.coordinator.online.admission_audit import audit_admissions
from penstock.services.coordinator.origins import Origins, warnings_of
from penstock.services.coordinator.queries.audit import Audit, audit_entries, audit_stored, sealed_by_seq
from penstock.services.coordinator.queries.browse import SampleBrowser, VideoBrowser
from penstock.services.coordinator.queries.charts import columns, metric_names, timeline
from penstock.services.coordinator.queries.logfiles import read_logs
from penstock.services.coordinator.queries.replays import replay_rows
from penstock.services.coordinator.queries.samples import token_texts
from penstock.services.coordinator.queries.storage_health import WriteProbe, ledger_waits, reserve_ledger
from penstock.services.coordinator.steering import Steering
from penstock.services.coordinator.submission import SubmissionIds, plan_job, tell
from penstock.services.coordinator.training.checkpoints import (
    Artifacts,
    checkpoint_row,
    checkpoint_rows,
    delete_checkpoint,
    find_file,
)
from penstock.services.coordinator.training.extension import check_extension, told_of_extension
from penstock.services.coordinator.training.journal import Journal, read_snapshots
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.user_code import CodeTrials, check_uploaded
from penstock.services.coordinator.webhooks.store import WebhookStore
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import group_bytes
from penstock.shared.config.jobs.kinds import AnyJob, AnyTraining, parse_job, parse_training, trains
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.files import FILES
from penstock.shared.errors import ArchiveError, ConfigError, Conflict, NotFound, PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.events import SealedGroup, decode_events
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord
from penstock.shared.runtime.ledger import ledger_archive, read_ledger
from penstock.shared.transport.bus import Bus, Message
from penstock.shared.transport.server import durability

__all__ = ["CoordinatorControl"]

Row = dict[str, Any]
"""A JSON object: str keys; values are JSON values (non-finite floats are sent as null)."""

FILM_S = 60.0
"""Deadline for describing a simulator with a camera (seconds): its first rendered frame is slow on a busy CPU."""
DESCRIBE_S = 30.0
"""Deadline for an env worker to create and describe a simulator at submission (seconds); a job has no such limit."""
AUDIT_CHUNK_BYTES = 64 << 20
"""Bytes of groups that the audit holds in memory at once; a larger group is held alone."""
KEPT_STATES = 8
"""Number of finished jobs whose folded ledger stays in memory, because every part of a download reads it."""


class CoordinatorControl:
    """Operations of the coordinator that the HTTP API calls.

    Every method that takes ``job`` (a full job id) raises NotFound for an unknown one. Every method may raise
    Unavailable (the bus does not answer: HTTP 503) or DeadlineError (HTTP 504). Return values are plain data, which the
    API neither keeps nor changes.
    """

    def __init__(
        self, bus: Bus, store: JobStore, members: Members, runners: Mapping[str, Leader], settings: ServiceSettings
    ) -> None:
        self.bus, self.store, self.members, self.settings = bus, store, members, settings
        self.leader = LeaderRpc(bus, runners)
        self._submission_ids = SubmissionIds(bus)
        self._probe = WriteProbe(bus, settings.worker_id, settings.nats_monitor_url)
        self.steering = Steering(bus, store, settings)
        self.keys = KeyStore(bus)
        self.audit_log = AuditLog(bus)
        self.dead_letters = DeadLetterQueue(bus)
        self.files = FileStore(settings.data_dir / FILES, max_bytes=settings.files_bytes, max_files=settings.max_files)
        self.graders = GraderBench(bus, settings)
        self.origins = Origins(store.index, self._state, settings.data_dir)
        self.deployments = Deployments(store, self.origins, self.submit, settings)
        self.fine_tuning = FineTuningService(self, self.files, settings)
        self.scaling = Scaler(bus, store)
        self.webhooks = WebhookStore(bus, private=settings.webhook_private)
        self.archive = ledger_archive(settings.data_dir)
        self._browser, self._artifacts = SampleBrowser(bus, self.archive), Artifacts(settings.data_dir / "checkpoints")
        self._videos = VideoBrowser(bus)
        self._finished: OrderedDict[tuple[str, int], LedgerState] = OrderedDict()
        """Folded ledgers of finished jobs, by job id and number of extensions; least recently used first."""
        self._folding = asyncio.Lock()

    # -- jobs --------------------------------------------------------------------------------------------------------

    async def submit(self, spec: AnyJob, raw: Row, *, key: str = "", fine_tuning: Row | None = None) -> JobRecord:
        """Store a new job durably and return its record; ``raw`` is the job file as the user wrote it.

        A repeated submission with the same ``key`` (made of its sender and request) returns the same job, on every
        replica. ``fine_tuning`` is the fine-tuning request that the job file was made from.

        Raises:
            ConfigError: the job file is valid but the job cannot run here (data missing, memory, budgets).
            HttpProblem: 507, the ledger has no room for another job.
            StreamFull: no room; the client may retry.
        """
        id = await self._submission_ids.job_id(key, json.dumps(raw, default=str).encode()) if key else ""
        if id and (known := await self.store.find(id)) is not None:
            return known
        spec, origin = await self.origins.resolve(spec)
        try:
            plan = await self._plan(spec)
        except ConfigError:
            if id and (known := await self.store.find(id)) is not None:  # what it collides with is itself
                return known
            raise
        record = await self.store.create(spec, id, fine_tuning=fine_tuning, origin=origin)
        await tell(self.bus, record.id, [*plan["warnings"], *warnings_of(spec, origin)])
        return record

    async def dry_run(self, spec: AnyJob) -> Row:
        """Return the effects of ``submit`` without submitting: resolved batch sizes, data summary, memory.

        Raises:
            ConfigError: as for ``submit``.
        """
        spec, origin = await self.origins.resolve(spec)
        plan = await self._plan(spec)
        plan["warnings"] += await CodeTrials(self.bus, self.graders, self.members).run(spec)
        if origin is None:
            return plan
        plan["warnings"] += warnings_of(spec, origin)
        return plan | {"origin": origin.model_dump(mode="json")}

    async def _plan(self, spec: AnyJob) -> Row:
        await asyncio.to_thread(check_uploaded, spec, self.settings.data_dir)
        if isinstance(spec, AnyTraining):
            await reserve_ledger(self.bus)
        atomic = (await self.bus.stream_state(subjects.EXPERIENCE)).atomic
        running = (await self.store.index()).unfinished()
        return await plan_job(spec, running, self.settings, self.members, stores_parts=atomic, describe=self._describe)

    async def _describe(self, spec: EmbodiedJob) -> EnvSpec:
        camera = spec.evaluation.num_videos > 0
        return await describe_environment(self.bus, spec, deadline_s=FILM_S if camera else DESCRIBE_S, camera=camera)

    async def _state(self, job: str) -> LedgerState:
        """Return the folded ledger of the job, read-only; cached for a finished job, whose snapshots are purged."""
        record = await self.store.get(job)
        if record.status.phase not in TERMINAL_PHASES:
            return await Journal(self.bus, job, archive=self.archive).load()
        async with self._folding:
            key = job, record.extensions
            state = self._finished.pop(key, None) or await Journal(self.bus, job, archive=self.archive).load()
            if state.finished and state.extensions == record.extensions:
                self._finished[key] = state
            while len(self._finished) > KEPT_STATES:
                self._finished.popitem(last=False)
        return state

    async def get(self, job: str) -> JobRecord:
        """Return the newest record, from memory or the bucket. Each long poll calls this up to four times a second."""
        return await self.store.get(job)

    async def list_jobs(
        self, *, after: str | None, limit: int, order: Order, phase: str | None, name: str | None, kind: str | None,
        labels: Mapping[str, str], models: frozenset[str] | None = None,
    ) -> list[JobRecord]:  # fmt: skip
        """Return at most ``limit`` records in id order (id = creation time), strictly past ``after`` in that order.

        ``phase``, ``name``, ``kind`` and each of ``labels`` (of ``metadata``) filter by equality; ``models`` keeps only
        jobs with one of these names or ids. ``after`` need not exist: it is only a position in the order. The API asks
        for one more record than a page holds, to learn if there is a next page.
        """
        index = await self.store.index()
        page = index.page(
            after=after, limit=limit, order=order, phase=phase, name=name, kind=kind, labels=labels, models=models
        )
        return [entry.record() for entry in page]

    async def job_entries(self, models: frozenset[str] | None = None) -> list[JobEntry]:
        """Return summaries of all jobs, or of those with one of these names or ids, oldest first; reads no records."""
        index = await self.store.index()
        return index.all() if models is None else index.of_models(models)

    async def delete(self, job: str, *, checkpoints: bool) -> None:
        """Delete a finished job with its ledger, groups, metrics, events and feedback; safe to repeat.

        ``checkpoints``: also delete its checkpoint files on the coordinator's host.

        Raises:
            Conflict: the job has not ended, or a running job started from one of these checkpoints.
        """
        folder = self.settings.data_dir / "checkpoints" if checkpoints else None
        await delete_job(self.bus, self.store, job, checkpoints=folder, archive=self.archive)
        for key in [key for key in self._finished if key[0] == job]:
            del self._finished[key]

    async def extend(self, job: str, max_updates: int, *, by: str) -> tuple[JobRecord, list[str]]:
        """Continue a finished job until ``max_updates``; return its record and messages for the user on what changes.

        Raises:
            Conflict: the job has not ended, or cannot continue (the message says why).
        """
        record = await self.store.get(job)
        if record.status.phase not in TERMINAL_PHASES:
            raise Conflict(f"job '{job}' is {record.status.phase}: amend train.max_updates instead")
        state = await self._state(job)
        await asyncio.to_thread(check_extension, record, state, max_updates, self.settings.data_dir)
        await reserve_ledger(self.bus)
        extended = await self.steering.extend(job, max_updates, by=by)
        return extended, told_of_extension(parse_training(record.spec), state, max_updates)

    # -- events, metrics, samples ------------------------------------------------------------------------------------

    async def events(self, job: str, *, after: int, limit: int) -> list[tuple[int, Row]]:
        """Return at most ``limit`` events with a sequence above ``after``, oldest first, each with its sequence.

        A row has at least ``time`` (Unix seconds), ``level`` (info|warning|error), ``type`` (such as ``phase``,
        ``step``, ``checkpoint``, ``worker``) and ``message``.
        """
        await self.store.get(job)
        found: list[tuple[int, Row]] = []
        scan = self.bus.scan(subjects.EVENTS, subjects.events(job), start_seq=after + 1)
        async with contextlib.aclosing(scan) as messages:
            async for message in messages:
                found.append((message.seq, msgspec.json.decode(message.data)))
                if len(found) >= limit:
                    break
        return found

    async def newest_event(self, job: str) -> int:
        """Return the sequence of the newest event of a job, or 0 if it has none."""
        last = await self.bus.last(subjects.EVENTS, subjects.events(job))
        return last.seq if last is not None else 0

    async def follow_events(self, job: str, *, after: int) -> AsyncIterator[tuple[int, Row]]:
        """Yield events and wait for new ones; see ``events``. Ends after the last event of a terminal job.

        The API closes this async generator when the client disconnects. Sequences rise strictly.
        """
        record = await self.store.get(job)
        last = await self.bus.last(subjects.EVENTS, subjects.events(job))
        since = record.extended_at.timestamp() if record.extended_at is not None else 0.0
        over = record.status.phase in TERMINAL_PHASES or (last is not None and is_last_event(last.data, since))
        if over:
            for item in await self.events(job, after=after, limit=1_000_000):
                yield item
            return
        async with contextlib.aclosing(
            self.bus.follow(subjects.EVENTS, subjects.events(job), start_seq=after + 1)
        ) as messages:
            async for message in messages:
                yield message.seq, msgspec.json.decode(message.data)
                if is_last_event(message.data, since):
                    return

    async def keeps_event(self, seq: int) -> bool:
        """Return True if the event with this sequence is still stored; if not, later ones may be gone, too."""
        try:
            await self.bus.get(subjects.EVENTS, seq)
        except NotFound:
            return False
        return True

    async def metrics(
        self, job: str, *, names: list[str] | None, step_from: int | None, step_to: int | None, max_points: int
    ) -> Row:
        """Return ``{"steps": [int], "wall": [Unix seconds], "series": {name: [float | None]}}``; lists equally long.

        ``names`` None: all metrics. Bounds are inclusive. At most ``max_points`` columns, with the first and last kept.
        """
        await self.store.get(job)
        messages = await self.bus.read(subjects.METRICS, subjects.metrics(job))
        wanted = partial(columns, names=names, step_from=step_from, step_to=step_to, max_points=max_points)
        return await asyncio.to_thread(lambda: wanted(_rows(messages)))

    async def workers(self, job: str, *, history: bool = False) -> list[Row]:
        """Return one row per live or recently lost worker of the job.

        ``service``, ``worker``, ``host``, ``pid``, ``ready``, ``age_s`` (of the last heartbeat), ``alive``, and the
        heartbeat's entry for this job (``version``, ``running``, ``waiting_for``, ``since``, ...). ``history``: with
        ``spans``, what each was seen to do in the last minutes.
        """
        await self.store.get(job)
        clock = time.monotonic()
        chosen = transports_of(job, self.members, clock)
        return [
            row | ({"chosen_transport": chosen[row["worker"]]} if row["worker"] in chosen else {})
            for row in self.members.rows(job, clock, history=history)
        ]

    async def metric_names(self, job: str) -> list[Row]:
        """Return ``name``, ``count``, ``first_step``, ``last_step`` and ``last`` value of every metric."""
        await self.store.get(job)
        messages = await self.bus.read(subjects.METRICS, subjects.metrics(job))
        return await asyncio.to_thread(lambda: metric_names(_rows(messages)))

    async def timeline(self, job: str, *, step: int | None, limit: int) -> list[Row]:
        """Return spans (``step``, ``stage``, ``start``, ``end``) of update ``step``, or of the newest ``limit``."""
        await self.store.get(job)
        entries = await read_ledger(self.bus, job, self.archive)
        return await asyncio.to_thread(_timeline, [entry.data for entry in entries], step, limit)

    async def samples(
        self, job: str, *, step: int | None, limit: int, sort: str | None, after: str | None,
        min_reward: float | None, env: str | None,
    ) -> list[Row]:  # fmt: skip
        """Return groups with completions, newest step first unless ``step`` is given; an evaluation job has step 0.

        ``sort``: ``reward``, ``-reward``, ``length``, ``-length`` or None (order in the batch). ``after``: id of the
        last row of the page before. ``env``: only rows whose prompts are from the source of that name. A row has
        ``id``, ``step``, ``draw``, ``index``, ``env``, ``prompt``, ``completion``, ``answer``, ``reward``,
        ``advantage``, ``tokens``, ``min_version``, ``max_version``, ``worker``.

        Raises:
            NotFound: the job is unknown, or it has no source of that name.
        """
        spec = (await self.store.get(job)).spec
        return await self._browser.page(
            job, spec, step=step, limit=limit, sort=sort, after=after, min_reward=min_reward, env=env
        )

    async def sample(self, job: str, row_id: str) -> Row:
        """Return one row with tokens, token texts, log-probs, mask, versions and siblings. Raises NotFound."""
        row = await self._browser.one(job, row_id, trains=trains((await self.store.get(job)).spec))
        return row | {"token_texts": await self._texts(job, row["token_ids"])} if "token_ids" in row else row

    async def _texts(self, job: str, token_ids: list[int]) -> list[str] | None:
        """Decode tokens with the tokenizer of the initial checkpoint; None if that is not on this host."""
        try:
            path, _ = await self.checkpoint_file(job, 0, "tokenizer.json")
            return await asyncio.to_thread(token_texts, path, token_ids)
        except (NotFound, Conflict, OSError, ValueError):
            return None

    async def videos(self, job: str) -> list[Row]:
        """Return the videos of held-out episodes, by policy version and reset id.

        ``name``, ``version``, ``reset_id``, ``task``, ``success``, ``reward`` (return), ``steps``, ``error`` (why there
        is no video) and ``href``.
        """
        await self.store.get(job)
        return await self._videos.rows(job)

    async def video(self, job: str, name: str) -> bytes:
        """Return the bytes of an MP4 file. Raises NotFound."""
        await self.store.get(job)
        return await self._videos.data(job, name)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def checkpoints(self, job: str) -> list[Row]:
        """Return the checkpoints of a job, oldest first.

        ``number``, ``version``, ``digest``, ``path``, ``time``, ``reason``, ``nbytes``, ``files`` (``name``,
        ``nbytes``, ``sha256``), ``available`` (the files are on the coordinator's host) and the flags ``initial``,
        ``best``, ``newest``, ``final``.
        """
        state = await self._state(job)
        return await asyncio.to_thread(checkpoint_rows, state, self.settings.data_dir)

    async def checkpoint(self, job: str, number: int) -> Row:
        """Return one row of ``checkpoints``. Raises NotFound."""
        state = await self._state(job)
        return await asyncio.to_thread(checkpoint_row, state, self.settings.data_dir, number)

    async def checkpoint_file(self, job: str, number: int, name: str) -> tuple[Path, str]:
        """Return the path and SHA-256 of a file of a committed checkpoint.

        Raises:
            NotFound: no such checkpoint, or its manifest does not name such a file.
            Conflict: the files are not on the coordinator's host.
        """
        state = await self._state(job)
        path, file = await asyncio.to_thread(find_file, state, self.settings.data_dir, number, name)
        return path, file.sha256

    async def delete_checkpoint(self, job: str, number: int) -> None:
        """Delete the files of a checkpoint. Raises NotFound, or Conflict: needed by the run, or not here."""
        await asyncio.to_thread(delete_checkpoint, await self._state(job), self.settings.data_dir, number)

    async def artifact(self, sha256: str) -> Path:
        """Return the path of a checkpoint file with this SHA-256, from any committed checkpoint. Raises NotFound."""
        return await asyncio.to_thread(self._artifacts.find, sha256)

    # -- diagnosis ---------------------------------------------------------------------------------------------------

    async def why(self, job: str) -> list[Row]:
        """Return what the job waits for now, most important first; empty if it waits for nothing.

        ``waiting_for`` (a phrase), ``subject``, ``id``, ``holder`` (worker or None), ``age_s``.
        """
        record = await self.store.get(job)
        if record.status.phase in TERMINAL_PHASES:
            return []
        return [*await self.leader.why(job), *await ledger_waits(self.bus)]

    async def audit(self, job: str) -> Row:
        """Check the ledger for consistency, by itself and with the streams.

        Returns ``{"ok": bool, "equation": {...}, "checks": [{"name", "ok", "detail"}], "violations": [str]}``.
        """
        record = await self.store.get(job)
        config = parse_job(record.spec)
        if not isinstance(config, AnyTraining):
            raise Conflict(f"job '{job}' is of kind '{config.kind}': it has no ledger to check")
        snapshots = await read_snapshots(self.bus, job)  # before the ledger, which then has every entry that they cover
        try:
            messages = await read_ledger(self.bus, job, self.archive)
        except ArchiveError as error:
            flawed = Audit()
            flawed.find("archive", str(error))
            return flawed.report()
        place = {message.seq: count for count, message in enumerate(messages, 1)}
        folds = {place.get(snapshot.seq, 0): state for snapshot, state, _ in snapshots}
        audit = await asyncio.to_thread(audit_entries, [message.data for message in messages], config, folds)
        wanted = sealed_by_seq(audit)
        for chunk in chunks_of({seq: largest_size(config, group) for seq, (_, group) in sorted(wanted.items())}):
            found = await self.bus.get_whole(subjects.EXPERIENCE, chunk)
            audit.groups_gone += len(chunk) - len(found)
            await asyncio.to_thread(_audit_groups, audit, [(*wanted[seq], m.data) for seq, m in found.items()])
        if isinstance(config, OnlineJob):
            entries = await asyncio.to_thread(lambda: [decode_events(message.data) for message in messages])
            audit.decisions_checked, flaws = await audit_admissions(self.bus, job, config, entries)
            for flaw in flaws:
                audit.find("decisions", flaw)
        return audit.report()

    async def logs(self, job: str, *, service: str | None, tail: int, after: str | None, unnamed: bool) -> Row:
        """Return ``{"lines": [{"service", "worker", "text"}], "next": cursor}``: the last lines.

        At most ``tail`` lines, or those after the cursor of an earlier reply. The cursor is opaque to the API.
        """
        await self.store.get(job)
        folder = self.settings.data_dir / "logs"
        return await asyncio.to_thread(
            read_logs, folder, job=job, service=service, tail=tail, after=after, unnamed=unnamed
        )

    async def replay(
        self, job: str, *, from_batch: int | None, to_batch: int | None, feedback: bool = False
    ) -> AsyncIterator[Row]:
        """Have the trainer repeat sealed batches from a retained checkpoint and compare; yield rows of progress.

        Rows are ``{"batch", "total", "match", "detail"}``; the last one has ``"done": true``, ``"ok": bool`` and
        ``"summary": str``. With ``feedback`` each has ``"told"``: see ``told_by_batch``.

        Raises:
            Conflict: nothing can be replayed now (raised before the first row).
        """
        record = await self.store.get(job)
        if not trains(record.spec):
            raise Conflict(f"job '{job}' is of kind '{record.kind}': it trained nothing that could be repeated")
        wanted = replay_rows(
            self.bus, job, archive=self.archive, from_batch=from_batch, to_batch=to_batch, feedback=feedback
        )
        async with contextlib.aclosing(wanted) as rows:
            async for row in rows:
                yield row

    # -- the deployment ----------------------------------------------------------------------------------------------

    async def limits(self) -> Row:
        """Return facts for ``GET /v1/limits``: ``durability`` (fsync|page-cache|unverified), sizes in bytes."""
        return {
            "durability": await durability(self.settings.nats_monitor_url),
            "experience_bytes": self.settings.experience_bytes,
            "ledger_bytes": self.settings.ledger_size,
            "stream_bytes": self.settings.stream_bytes,
        }

    async def health(self) -> tuple[bool, Row]:
        """Return readiness to serve, and ``{check: {"ok": bool, "detail": str}}``. Takes at most 1 s; never raises."""
        checks: Row = {
            "nats": {"ok": self.bus.connected, "detail": "connected" if self.bus.connected else "no connection"}
        }
        try:
            async with asyncio.timeout(0.8):
                flaw = await self._probe.flaw(0.5)
                checks["write"] = {"ok": not flaw, "detail": flaw or "taken"}
                state = await self.bus.stream_state(subjects.LEDGER)
                checks["leader"] = {"ok": True, "detail": await self.leader.name()}
            checks["ledger"] = {"ok": True, "detail": f"{state.messages} entries"}
        except (PenstockError, TimeoutError) as error:
            checks["ledger"] = {"ok": False, "detail": str(error) or "the ledger stream does not answer"}
        return all(check["ok"] for check in checks.values()), checks


def chunks_of(sizes: Mapping[int, int]) -> list[list[int]]:
    """Split the keys of ``sizes`` (key -> bytes), in order, into runs of at most AUDIT_CHUNK_BYTES, or of one key."""
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


def _rows(messages: Sequence[Message]) -> list[Row]:
    return [msgspec.json.decode(message.data) for message in messages]


def _audit_groups(audit: Audit, found: Sequence[tuple[int, SealedGroup, bytes]]) -> None:
    for number, sealed, data in found:
        audit_stored(audit, number, sealed, data)


def _timeline(entries: Sequence[bytes], step: int | None, limit: int) -> list[Row]:
    return timeline((event for data in entries for event in decode_events(data)), step=step, limit=limit)


def is_last_event(data: bytes, since: float = 0.0) -> bool:
    """Return True if an event reports a terminal phase, at or after ``since`` (last extension, Unix seconds)."""
    row = msgspec.json.decode(data)
    return row["time"] >= since and row["type"] == "phase" and str(row["message"]).split(":")[0] in TERMINAL_PHASES
