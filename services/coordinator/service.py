"""The coordinator process: one leader runs every job; any replica may answer HTTP.

The lease ``leases/coordinator`` selects the leader. A leader that loses it stops its job tasks at once; the ledger
refuses writes that it still had in flight (Fenced).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.jobs.gauges import StreamGauges
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.retention import FULL_SHARE, GIVEN_UP, oldest_finished, without_interactions
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.dead_letters import DeadLetterScanner
from penstock.services.coordinator.leader.effects import purge_manifests
from penstock.services.coordinator.leader.evaluation_runner import EvaluationRunner
from penstock.services.coordinator.leader.leader_rpc import COORDINATOR, Leader
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.leader.serving_runner import ServingRunner
from penstock.services.coordinator.ledger_room import describe_ledger, is_filling
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.services import build_services
from penstock.services.coordinator.serving import Gateway
from penstock.services.coordinator.training.journal import MIN_SEGMENT_BYTES, archive_whole
from penstock.services.coordinator.training.restart import earliest_start
from penstock.services.coordinator.webhooks.delivery import Courier
from penstock.services.coordinator.webserver import server_of
from penstock.shared.config.jobs.kinds import parse_training, trains
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Fenced, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobFailure, JobRecord
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.protocol.trace import tracing
from penstock.shared.runtime.jobs import release_memory
from penstock.shared.runtime.lease import Lease
from penstock.shared.runtime.logs import bound
from penstock.shared.runtime.tasks import end_tasks, first_error, unexpected
from penstock.shared.transport.bus import Bus

__all__ = ["CoordinatorService"]

logger = logging.getLogger(__name__)


RETRY_S = 1.0
ROOM_EVERY_S = 5.0
ARCHIVE_SHARE, ARCHIVED_AT_ONCE = 0.5, 64
"""Fill level of LEDGER above which the ledgers of finished jobs are archived whatever their size, and the number of
jobs whose ledgers are archived at a time."""
BROKEN_TRIES = 3
"""Number of crashes of a job's leader, caused by unexpected errors, after which the job is marked failed."""
WOKEN_AT_ONCE = 16
"""Number of job leaders that are woken per turn of the event loop after workers joined or changed their readiness."""
HEARD_AFTER = 1.5
"""Number of heartbeat intervals after which a new coordinator knows every worker."""
SOUND_S = 300.0
"""A leader that ran for this long (seconds) resets the count of crashes."""


class CoordinatorService:
    """The coordinator process: connects the bus, the leaders of jobs and the HTTP API."""

    name = "coordinator"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.members = Members()
        self._expect_members()
        self.store = JobStore(bus)
        self.runners: dict[str, Leader] = {}
        self.feedback = FeedbackService(
            bus, self.store, settings.data_dir, ids_keep_s=settings.live_keep_s, share=settings.tenant_share,
            worker=settings.worker_id,
        )  # fmt: skip
        self.gateway = Gateway(
            bus,
            settings.worker_id,
            pseudonym=self.feedback.pseudonyms.of,
            consent_of=self.feedback.consents.of,
            share=settings.tenant_share,
        )
        self.leading = False
        self.ready = False
        self.services = build_services(bus, self.store, self.members, self.runners, settings)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: uvicorn.Server | None = None
        self._http: asyncio.Task[None] | None = None
        self._stopping, self._workers_changed = asyncio.Event(), asyncio.Event()
        self._ledger_fills = False

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.bus.ensure_streams(
            experience_bytes=self.settings.experience_bytes, stream_bytes=self.settings.stream_bytes,
            ledger_bytes=self.settings.ledger_size, live_keep_s=self.settings.live_keep_s,
            audit_keep_s=self.settings.audit_keep_s, replicas=self.settings.stream_replicas,
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            self._http = tasks.create_task(self._serve_http())
            tasks.create_task(self.feedback.run())
            tasks.create_task(self.gateway.run())
            tasks.create_task(self._hear_heartbeats())
            tasks.create_task(self._lead_forever())
            tasks.create_task(DeadLetterScanner(self.bus, self.members, self.runners).run())
            tasks.create_task(self._keep_room())
            tasks.create_task(StreamGauges(self.bus, self.members).run())
            self.ready = True

    async def drain(self) -> None:
        """Stop accepting requests, and wait until the requests in progress have ended. Jobs continue under the next
        leader."""
        self.ready = False
        self._stopping.set()
        if self._server is not None:
            self._server.should_exit = True
        if self._http is not None:
            await asyncio.wait({self._http})

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the status of each job that this replica leads."""
        return {job: runner.status() for job, runner in self.runners.items() if runner.ready}

    async def _serve_http(self) -> None:
        app = create_app(self.services, stopping=self._stopping, feedback_service=self.feedback, serving=self.gateway)
        self._server = server_of(app, self.settings)
        await self._server._serve()
        if not self._server.should_exit:
            raise ConfigError(f"cannot serve HTTP on {self.settings.http_host}:{self.settings.http_port}")

    def _expect_members(self) -> None:
        """Let submissions wait until every worker has had enough time to send a heartbeat."""
        self.members.complete_at = time.monotonic() + HEARD_AFTER * self.settings.heartbeat_s

    async def _hear_heartbeats(self) -> None:
        def hear(subject: str, data: bytes) -> None:
            try:
                beat, _ = unpack(data, Heartbeat)
            except ProtocolError as error:
                logger.warning("heartbeat on %s ignored: %s", subject, error)
                return
            if self.members.on_heartbeat(beat, time.monotonic()):
                self._workers_changed.set()

        await self.bus.subscribe(subjects.HEARTBEATS, hear)
        self._expect_members()
        while True:
            await self._workers_changed.wait()
            self._workers_changed.clear()
            for count, runner in enumerate(list(self.runners.values()), 1):
                runner.wake()
                if count % WOKEN_AT_ONCE == 0:
                    await asyncio.sleep(0)

    # -- leadership --------------------------------------------------------------------------------------------------

    async def _lead_forever(self) -> None:
        while True:
            lease = Lease(self.bus, COORDINATOR, holder=self.settings.worker_id, lease_s=self.settings.lease_s)
            async with self._holding(lease) as epoch:
                logger.info("leading with epoch %d", epoch)
                await self._lead(epoch, lease)

    @asynccontextmanager
    async def _holding(self, lease: Lease) -> AsyncIterator[int]:
        epoch = await lease.acquire()
        self.leading = True
        try:
            yield epoch
        finally:
            self.leading = False
            await self._stop_all()
            await lease.release()

    async def _lead(self, epoch: int, lease: Lease) -> None:
        """Run every unfinished job, until the lease is lost."""
        courier = Courier(self.bus, self.services.webhooks, private=self.settings.webhook_private)
        parts = (
            self._watch_jobs(epoch), lease.keep(), self.services.leader.serve(), self.feedback.finish_deletions(),
            courier.run(), self.services.scaling.run(),
        )  # fmt: skip
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Fenced | Unavailable):
                logger.warning("not leading any more: %s", result)
            elif isinstance(result, Exception):
                raise result

    async def _watch_jobs(self, epoch: int) -> None:
        async for job in self.store.watch():
            runner = self.runners.get(job.id)
            if runner is not None:
                runner.update_record(job.record())
            elif not job.finished and job.id not in self._tasks:
                self._tasks[job.id] = asyncio.create_task(self._run_job(job.id, epoch))

    async def _run_job(self, job: str, epoch: int) -> None:
        """Lead one job until it ends; an error of one job never ends another job. A job whose leader keeps crashing is
        marked failed."""
        broken, began = 0, time.monotonic()
        while (error := await unexpected(self._lead_job(job, epoch))) is not None:
            expected = _only(error, Fenced, Unavailable)
            broken = 0 if time.monotonic() - began > SOUND_S else broken
            broken += not expected
            logger.warning("leading job %s again: %s", job, error, exc_info=None if expected else error)
            if broken >= BROKEN_TRIES:
                error = await unexpected(self._fail(job, f"internal error: {first_error(error)}"))
                if error is None or not _only(error, Unavailable):
                    break
            await asyncio.sleep(RETRY_S)
            began = time.monotonic()
        await self.clean_up(job)
        await release_memory()
        self._tasks.pop(job, None)
        entry = (await self.store.index()).get(job)
        if entry is not None and not entry.finished:  # extended in the meantime
            self._tasks.setdefault(job, asyncio.create_task(self._run_job(job, epoch)))

    async def _lead_job(self, job: str, epoch: int) -> None:
        """Read the record of a job and lead the job until it ends; return at once if it has ended already."""
        record = await self.store.find(job)
        if record is None or record.status.phase in TERMINAL_PHASES:  # it ended meanwhile, and may be deleted
            return
        with bound(job=job), tracing(record.trace):
            logger.info("leading job %s", job)
            runner = self.runners[job] = self._leader(record, epoch)
            try:
                await runner.lead()
            finally:
                self.runners.pop(job, None)

    async def _fail(self, job: str, reason: str) -> None:
        error = JobFailure(code="internal", message=reason, service="coordinator")
        await self.store.set_status(job, phase="failed", message=reason, error=error, finished_at=bus_datetime())

    def _leader(self, record: JobRecord, epoch: int) -> Leader:
        if not trains(record.spec):
            runner = ServingRunner if record.kind == "serving" else EvaluationRunner
            return runner(self.bus, self.store, self.members, record, epoch=epoch)
        config = parse_training(record.spec)
        supply: LiveSupply | None = None
        if isinstance(config, OnlineJob):
            supply = LiveSupply(self.bus, record.id, config, epoch=epoch, archive=self.services.archive)
        return JobRunner(
            self.bus, self.store, self.members, record, epoch=epoch, data_dir=self.settings.data_dir, supply=supply
        )

    async def clean_up(self, job: str) -> None:
        """Delete the data of a finished job that is no longer needed. Retry while the bus is unreachable: no later
        clean-up visits this job."""
        while (error := await unexpected(self._purge_leftovers(job))) is not None:
            expected = _only(error, Unavailable)
            logger.warning("cleaning up after job %s: %s", job, error, exc_info=None if expected else error)
            if not expected:
                return
            await asyncio.sleep(RETRY_S)

    async def _purge_leftovers(self, job: str) -> None:
        """Purge the tickets, unfinished work and snapshots of a finished job, and archive its ledger. Its groups stay
        for replay."""
        await self.bus.purge(subjects.SNAPSHOTS, subjects.snapshots(job))
        await self.bus.purge(subjects.PARTIAL, subjects.partials(job))
        for stream, subject in ((subjects.TICKETS, subjects.tickets(job)), (subjects.RAW, subjects.raw(job))):
            await self.bus.purge(stream, subject)
        await self.bus.delete_consumer(subjects.TICKETS, f"rollout-{job}")
        await self.bus.delete_consumer(subjects.RAW, f"reward-{job}")
        await self._archive(job, MIN_SEGMENT_BYTES)

    async def _archive(self, job: str, least: int) -> None:
        """Move the ledger of a finished job to the archive, if LEDGER holds at least ``least`` bytes of it."""
        try:
            await archive_whole(self.bus, job, self.services.archive, least=least)
        except Fenced as error:
            logger.info("the ledger of job %s is not archived: %s", job, error)
        except Unavailable:
            raise
        except OSError as error:
            logger.error("the ledger of job %s is not archived: %s", job, error)

    async def _stop_all(self) -> None:
        await end_tasks(list(self._tasks.values()))
        self._tasks.clear()
        self.runners.clear()

    async def _keep_room(self) -> None:
        """Every few seconds, make room in streams that are nearly full, archive ledgers, and warn if LEDGER is becoming
        full."""
        while True:
            await asyncio.sleep(ROOM_EVERY_S)
            if not self.leading or self.bus.held:
                continue
            try:
                for stream in GIVEN_UP:
                    await self.make_room(stream)
                await self.archive_ledgers()
                await self.watch_ledger()
            except Unavailable as error:
                logger.info("room is not checked: %s", error)

    async def archive_ledgers(self) -> None:
        """If LEDGER is more than half full, archive ledgers of finished jobs and old entries of running jobs."""
        state = await self.bus.stream_state(subjects.LEDGER)
        if state.bytes <= ARCHIVE_SHARE * state.max_bytes:
            return
        counts = await self.bus.subject_counts(subjects.LEDGER)
        finished = [job.id for job in (await self.store.index()).all() if job.finished]
        for job in [job for job in finished if counts.get(subjects.ledger(job), 0) > 1][:ARCHIVED_AT_ONCE]:
            await self._archive(job, 1)
        for runner in list(self.runners.values()):
            if isinstance(runner, JobRunner) and runner.ready:
                runner.outbox.later(runner.journal.keep_up, keep=False)

    async def watch_ledger(self) -> None:
        """Warn once when LEDGER becomes too full. Warn again only if LEDGER had enough free space in the meantime."""
        state = await self.bus.stream_state(subjects.LEDGER)
        filled, self._ledger_fills = self._ledger_fills, is_filling(state)
        if not self._ledger_fills or filled:
            return
        logger.warning("%s", describe_ledger(state))
        for runner in list(self.runners.values()):
            if isinstance(runner, JobRunner):
                runner.outbox.event("warning", "ledger_filling", describe_ledger(state))

    async def make_room(self, stream: str) -> None:
        """If ``stream`` is nearly full, purge data from it that jobs can do without.

        The oldest finished job loses its data first. Without one, some streams lose older data of all jobs.
        """
        state = await self.bus.stream_state(stream)
        if state.bytes <= FULL_SHARE * state.max_bytes:
            return
        if stream == subjects.INTERACTIONS:
            await self._drop_interactions()
            return
        counts = await self.bus.subject_counts(stream)
        job = oldest_finished((await self.store.index()).all(), counts, stream)
        if job is None and stream == subjects.BATCHES:
            await self._shorten_batches()
        if job is None and stream == subjects.DECISIONS:
            middle = (state.first_seq + state.last_seq) // 2
            count = await self.bus.purge(stream, subjects.decisions("*"), below_seq=middle + 1)
            logger.warning("%s is nearly full: its %d oldest messages are given up", stream, count)
        if job is not None:
            logger.warning("%s is %d of %d bytes full: giving up what finished job %s has there",
                           stream, state.bytes, state.max_bytes, job)  # fmt: skip
            await self.bus.purge(stream, GIVEN_UP[stream](job))

    async def _drop_interactions(self) -> None:
        """Purge the interactions of one job that can do without them: the first job in ``without_interactions`` that
        has any.

        Each interaction has a subject of its own, so counting messages by subject would be too slow here.
        """
        for job in without_interactions((await self.store.index()).all()):
            if count := await self.bus.purge(subjects.INTERACTIONS, subjects.interactions(job)):
                logger.warning("INTERACTIONS is nearly full: giving up the %d of job %s", count, job)
                return

    async def _shorten_batches(self) -> None:
        """Purge from BATCHES the manifests of running jobs' batches that no restarted trainer would train again."""
        for job, runner in list(self.runners.items()):
            if isinstance(runner, JobRunner) and runner.ready and (newest := runner.run.state.checkpoint) is not None:
                start = earliest_start(runner.run.state, newest.number)
                count = await purge_manifests(self.bus, job, up_to=start)
                logger.warning("BATCHES is nearly full: job %s gave up %d manifests before its checkpoint", job, count)


def _only(error: BaseException, *kinds: type[Exception]) -> bool:
    """Return True if ``error`` is an instance of one of ``kinds``; for an exception group, if every leaf of the group
    is."""
    if isinstance(error, BaseExceptionGroup):
        return all(_only(inner, *kinds) for inner in error.exceptions)
    return isinstance(error, kinds)
