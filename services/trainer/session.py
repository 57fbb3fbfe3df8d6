"""Training session of one job on one trainer, which makes sure that each batch is trained exactly once.

A checkpoint holds weights, optimizer, RNG, batch number and version. A restarted trainer loads the newest checkpoint in
the ledger, repeats the batches trained after it, compares each weight digest with the ledger, and only then continues.
On several ranks the session runs on rank 0; the other ranks follow its orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import torch

from penstock.services.trainer.batch.inputs import BatchInputs, Untrainable
from penstock.services.trainer.batch.statistics import lag_facts
from penstock.services.trainer.checkpointing import Checkpointing, pinned_in
from penstock.services.trainer.fence import Fence
from penstock.services.trainer.progress import Progress
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.rank_group import RankGroup
from penstock.services.trainer.ranks.heartbeats import Ranks, Threads
from penstock.services.trainer.replica import Replica
from penstock.services.trainer.reports import Reporter
from penstock.services.trainer.start import Start
from penstock.services.trainer.update_rules.on_policy import NonFiniteStep
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import CHECKPOINTS, ServiceSettings
from penstock.shared.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineError,
    Fenced,
    ProtocolError,
    RankLost,
    Unavailable,
)
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import Ack, BatchManifest, Command, Report
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.runtime.lease import Lease
from penstock.shared.runtime.tasks import first_error, raise_if_cancelled
from penstock.shared.transport.bus import Bus

__all__ = ["TrainerSession", "is_wanted"]

logger = logging.getLogger(__name__)


async def is_wanted(bus: Bus, job: str) -> bool:
    """Return True if the job exists and its desired state is not 'paused'; False while the bus is unavailable."""
    try:
        entry = await bus.kv(subjects.JOBS).get(job)
    except Unavailable:  # the caller polls
        return False
    if entry is None or entry.value is None:
        return False
    return JobRecord.model_validate_json(entry.value).desired_state != "paused"


RESTART_S = 0.5
RESUMED_POLL_S = 1.0
COMPLETE_S = 10.0
"""Time between attempts to publish a version by a transport that failed, while no batch is to be trained (seconds)."""
TURN_LEASES = 4
"""Number of lease durations for which a job waits for its lease before it yields the ranks to other jobs. A trainer
that cannot open a job waits as long before it tries again."""


class TrainerSession:
    """Holds the trainer lease of a job and trains its sealed batches one after another.

    Args:
        ranks: the ranks over which the job's models are sharded; None: this process trains the job
            alone, beside other jobs.
    """

    def __init__(
        self,
        bus: Bus,
        settings: ServiceSettings,
        job: str,
        config: AnyTraining,
        ranks: Ranks | None = None,
    ) -> None:
        self._bus, self._settings, self.job, self.config, self._ranks = bus, settings, job, config, ranks
        self._own_threads = Threads() if ranks is None else None
        threads = ranks.threads if ranks is not None else self._own_threads
        assert threads is not None
        replica = Replica(
            bus, job, config, world=ranks.world if ranks is not None else None, threads=threads,
            checkpoints=settings.data_dir / CHECKPOINTS,
        )  # fmt: skip
        self._rank_group = RankGroup(replica, ranks)
        gated = isinstance(config, OnlineJob) and config.online.promotion is not None
        self._publishing = Publishing(bus, settings, job, gated=gated)
        self._fence = Fence()
        self._reporter = Reporter(bus, job, self._fence)
        self._checkpointing: Checkpointing | None = None
        self._inputs: BatchInputs | None = None
        self._waiting: tuple[str, str, float] | None = None
        self._epoch = 0
        self._draining = False
        self._leaving = ""
        """Reason passed to ``leave``; empty: the session takes no checkpoint when it ends."""
        self._unopened = ""
        """Error that prevents opening the job here; empty if none."""
        self._going_back = ""
        """Reason for which the coordinator wants this trainer to restart from an earlier batch; empty if none."""
        self._left_out: frozenset[str] = frozenset()
        """Draws that must not be trained any more, because the data of their users is being deleted."""
        self._lost: WeightManifest | None = None
        """Manifest of published weights that a worker cannot open, as that worker reported; None if there is none."""
        self.progress = Progress()
        self._seconds = {"wait": 0.0, "publish": 0.0}
        self._reported_seconds: dict[str, float] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until cancelled or drained. Start over when the ledger or the lease requires it.

        Raises:
            RankLost: another rank is lost; this process must end (alone, or in an ExceptionGroup).
        """
        try:
            while not self._draining:
                async with contextlib.nullcontext() if self._ranks is None else self._turn(self._ranks):
                    await self._under_lease()
                raise_if_cancelled()
                if self._unopened:
                    await self._until_resumed(self._unopened)
                    await self._let_others_try()
                await asyncio.sleep(0 if self._draining else RESTART_S)
        finally:
            if self._own_threads is not None:
                self._own_threads.close()
            await asyncio.to_thread(self._publishing.close)  # behind a thread that still publishes

    @contextlib.asynccontextmanager
    async def _turn(self, ranks: Ranks) -> AsyncIterator[None]:
        if ranks.turn.locked():
            self._wait("its turn on the ranks of this trainer, which train another job", subjects.LEASES)
        async with ranks.turn:
            yield

    async def _under_lease(self) -> None:
        self._wait("the trainer lease of this job", subjects.LEASES)
        settings = self._settings
        lease = Lease(self._bus, f"trainer.{self.job}", holder=settings.worker_id, lease_s=settings.lease_s)
        try:
            self._epoch = await lease.acquire(None if self._ranks is None else TURN_LEASES * settings.lease_s)
        except DeadlineError as error:
            logger.info("%s", error)
            return
        try:
            if not self._draining:
                await self._hold(lease)
        except* Fenced as group:
            logger.warning("starting over: %s", first_error(group))
        finally:
            await lease.release()
            with contextlib.suppress(RankLost):
                await self._rank_group.close()

    async def _hold(self, lease: Lease) -> None:
        # A new reporter: reports queued under an earlier lease are obsolete.
        self._reporter = Reporter(self._bus, self.job, self._fence)
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(lease.keep())
            try:
                await self._train()
            except* (ConfigError, DataError, CheckpointError) as group:
                reason = str(first_error(group))
                await self._reporter.ask(Report(kind="failed", epoch=self._epoch, reason=reason))
                self._wait(f"the coordinator to end this job, which cannot go on: {reason}", subjects.JOBS)
                await asyncio.Event().wait()  # the session ends with the job
            keeping.cancel()

    async def _train(self) -> None:
        self._wait("the coordinator to say where to start", subjects.report(self.job))
        start = await self._reporter.ask(Report(kind="hello", epoch=self._epoch))
        self.progress, self._going_back = Progress(), ""
        checkpointing = self._checkpointing = Checkpointing(
            self._rank_group, self._reporter, self.job, self.config, root=self._settings.data_dir / CHECKPOINTS,
            epoch=self._epoch, pinned=pinned_in(start) or {0}, wake=self._wake,
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._reporter.run()), tasks.create_task(checkpointing.run())]
            await self._begin(start)
            self._inputs = self._rank_group.inputs(self.progress.batch)
            background.append(tasks.create_task(self._inputs.run()))
            server = await self._bus.serve(subjects.command(self.job), self._on_command)
            asking = await self._bus.serve(subjects.lost_weights(self.job), self._on_lost_weights)
            try:
                while not self._draining:
                    await self._step()
                await self._reporter.settled()
                await checkpointing.written()
                if self._leaving:
                    await checkpointing.secure(self.progress, self._leaving, wanted=lambda: self.leaves)
            finally:
                await server.close(0.5)
                await asking.close(0.5)
                for task in background:
                    task.cancel()

    async def _begin(self, start: dict[str, Any]) -> None:
        self._wait("the model to be built", subjects.report(self.job))
        self._unopened = ""
        try:
            described = start.get("environment")
            await self._rank_group.open(msgspec.convert(described, EnvSpec) if described else None)
        except (ConfigError, CheckpointError, torch.OutOfMemoryError) as error:  # CheckpointError: of another rank
            if start["checkpoint"] is None:
                raise
            # The trained state is worth more than this backend or machine: the user can choose another one.
            self._unopened = str(error)
            await self._ask_for_a_pause(start["last_trained"] + 1, 0, self._unopened)
            raise Fenced(f"the job cannot be opened here: {error}") from None
        try:
            await self._rank_group.remove_leftovers()
        except OSError as error:
            logger.warning("unfinished checkpoints of job %s are not deleted: %s", self.job, error)
        begin = Start(
            self._bus, self.job, self.config, rank_group=self._rank_group, publishing=self._publishing,
            reporter=self._reporter, progress=self.progress, epoch=self._epoch, wait=self._wait,
            data_dir=self._settings.data_dir,
        )  # fmt: skip
        if start["checkpoint"] is not None:
            await begin.restore(start)
            if begin.damaged:
                assert self._checkpointing is not None
                await self._checkpointing.take(self.progress)
            return
        await begin.begin()
        assert self._checkpointing is not None
        await self._checkpointing.take(self.progress)

    @property
    def leaves(self) -> bool:
        """Return True if the session ends because of ``leave``."""
        return bool(self._leaving)

    def leave(self, reason: str) -> None:
        """Stop at the next step boundary, after a checkpoint of everything trained by then.

        ``reason`` is recorded with the checkpoint.
        """
        self.drain()
        self._leaving = reason

    def drain(self) -> None:
        """Stop at the next step boundary, without a last checkpoint."""
        self._leaving = ""
        self._draining = True
        self._wake()

    def _wake(self) -> None:
        if self._inputs is not None:
            self._inputs.arrived.set()

    # -- steps -------------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """Take a checkpoint if one is due, then train the next sealed batch. Raises Fenced to start over."""
        assert self._checkpointing is not None
        if self._going_back:
            raise Fenced(f"back to an earlier batch: {self._going_back}")
        if self._lost is not None:
            await self._publish_again(self._lost)
        if self._checkpointing.asked:
            self._wait(f"a copy of the state after batch {self.progress.batch}", subjects.report(self.job))
            await self._checkpointing.take(self.progress)
        began = time.perf_counter()
        manifest = await self._next_manifest()
        if manifest is None:
            return
        self._seconds["wait"] += time.perf_counter() - began
        if manifest.start_version != self.progress.version:
            raise Fenced(
                f"batch {manifest.number} starts from {manifest.start_version}, this trainer is at "
                f"{self.progress.version}"
            )
        await self._train_batch(manifest)

    async def _publish_again(self, lost: WeightManifest) -> None:
        """Publish the current version again, because a worker cannot open the weights that ``lost`` describes.

        Raises:
            Fenced: ``lost`` is not of the current version, or is an adapter, so the session must start over from a
                checkpoint.
        """
        self._lost, progress = None, self.progress
        await self._reporter.settled()
        if not await self._publishing.stands(lost):
            return  # it was announced again meanwhile
        if (lost.version, lost.digest) != (progress.version, progress.digest) or lost.base:
            raise Fenced(f"the weights of version {lost.version} are gone, and are made again")
        logger.warning("version %d is published again: a worker cannot open it", lost.version)
        published = await self._publishing.publish(self._rank_group, version=progress.version, epoch=self._epoch)
        await self._publishing.announce(published)

    async def _next_manifest(self) -> BatchManifest | None:
        assert self._inputs is not None
        number = self.progress.batch + 1
        manifest = self._inputs.peek(number)
        if manifest is None:
            self._wait(f"batch {number} to be sealed", subjects.batches(self.job))
            await self._arrival(self._inputs.arrived)
            manifest = self._inputs.peek(number)
        if manifest is not None and manifest.start_version < self.progress.version:  # a fork rolled it back
            self._inputs.refused(manifest)
            return None
        bad = [group.draw for group in manifest.groups if str(group.draw) in self._left_out] if manifest else []
        if manifest is not None and bad:
            await self._refuse(manifest, Untrainable(bad, "their users' data is being deleted"))
            return None
        return manifest

    async def _arrival(self, arrived: asyncio.Event) -> None:
        """Wait until ``arrived`` is set (a sealed batch arrived), and clear it. Meanwhile, retry the transports by
        which the newest version could not be published. If all workers lack this version, no batch can arrive before
        they have it."""
        while not arrived.is_set():
            try:
                async with asyncio.timeout(COMPLETE_S if self._publishing.problem is not None else None):
                    await arrived.wait()
            except TimeoutError:
                await self._reporter.settled()
                await self._publishing.complete()
        arrived.clear()

    async def _train_batch(self, manifest: BatchManifest) -> None:
        assert self._inputs is not None
        self._waiting = None
        try:
            metrics = await self._rank_group.train(manifest, self._inputs)
        except Untrainable as error:
            await self._refuse(manifest, error)
            return
        except ProtocolError as error:
            await self._refuse(manifest, Untrainable([group.draw for group in manifest.groups], str(error)))
            return
        except NonFiniteStep as error:
            await self._halt(manifest, error)
            return
        progress = self.progress
        progress.version = manifest.start_version + 1
        began = time.perf_counter()
        await self._reporter.settled()  # at most one version is not yet announced to engines
        published = await self._publishing.publish(self._rank_group, version=progress.version, epoch=self._epoch)
        self._seconds["publish"] += time.perf_counter() - began
        progress.batch, progress.digest = manifest.number, published.digest
        self._inputs.trained(manifest)
        metrics |= {
            **lag_facts(manifest),
            "tokens/trained": float(sum(group.tokens for group in manifest.groups)),
            **self._second_facts(),
        }
        await self._reporter.post(
            Report(
                kind="trained", epoch=self._epoch, batch=manifest.number, revision=manifest.revision,
                version=progress.version, digest=published.digest, metrics=metrics,
            ),
            # Not before: a trainer that repeats the batch may get other bits, and engines would have seen both.
            partial(self._publishing.announce, published),
        )  # fmt: skip

    async def _refuse(self, manifest: BatchManifest, error: Untrainable) -> None:
        assert self._inputs is not None
        self._inputs.refused(manifest)
        logger.warning("batch %d cannot be trained: %s", manifest.number, error.reason)
        await self._reporter.post(
            Report(
                kind="refused", epoch=self._epoch, batch=manifest.number, revision=manifest.revision,
                bad=error.bad, reason=error.reason,
            )
        )  # fmt: skip

    async def _halt(self, manifest: BatchManifest, error: NonFiniteStep) -> None:
        """Ask the coordinator to pause the job after ``error``, a loss or gradient that is not finite. Return once the
        job is resumed; the session then trains the batch again from its start.

        Raises:
            Fenced: steps of the batch were already made, so the session must start over from a checkpoint.
        """
        logger.error("batch %d is not trained: %s", manifest.number, error.reason)
        await self._reporter.settled()
        await self._ask_for_a_pause(manifest.number, manifest.revision, error.reason)
        await self._until_resumed(error.reason)
        if error.changed:
            raise Fenced(f"batch {manifest.number} was left half trained: back to the last checkpoint")

    async def _ask_for_a_pause(self, batch: int, revision: int, reason: str) -> None:
        """Ask the coordinator to pause the job before a batch."""
        report = Report(kind="halted", epoch=self._epoch, batch=batch, revision=revision, reason=reason)
        await self._reporter.ask(report)

    async def _until_resumed(self, reason: str) -> None:
        """Wait until the job is resumed, the coordinator wants a restart from an earlier batch, or the session ends."""
        self._wait(f"the job to be resumed: {reason}", subjects.JOBS)
        while not (self._draining or self._going_back or await is_wanted(self._bus, self.job)):
            await asyncio.sleep(RESUMED_POLL_S)

    async def _let_others_try(self) -> None:
        """Wait before the next attempt to open the job, so that another trainer can get the lease and try first."""
        end = time.monotonic() + TURN_LEASES * self._settings.lease_s
        while not self._draining and time.monotonic() < end:
            await asyncio.sleep(min(RESTART_S, self._settings.lease_s))

    async def _on_command(self, data: bytes) -> bytes:
        command, _ = unpack(data, Command)
        heard = self._fence.epoch if self._inputs is None else max(self._fence.epoch, self._inputs.epoch)
        if command.epoch < heard or not self._fence.lets_in(command.epoch):
            logger.warning("'%s' of a fenced coordinator (epoch %d) refused", command.kind, command.epoch)
            reason = f"epoch {command.epoch} is over: a coordinator with epoch {heard} leads"
            return pack(Ack(ok=False, reason=reason), job=self.job, epoch=self._epoch)
        if command.kind == "checkpoint" and self._checkpointing is not None:
            self._checkpointing.ask(str(command.args.get("reason", "")))
        if command.kind == "rollback" and int(command.args["version"]) >= self.progress.version:  # unless done already
            self._going_back = str(command.args.get("reason", ""))
            self._wake()
        if command.kind == "leave_out":  # a batch in training is finished
            self._left_out = frozenset(map(str, command.args["draws"]))
        return pack(Ack(ok=True), job=self.job, epoch=self._epoch)

    async def _on_lost_weights(self, data: bytes) -> bytes:
        self._lost, _ = unpack(data, WeightManifest)
        self._wake()
        return pack(Ack(ok=True), job=self.job, epoch=self._epoch)

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by stage since this session began."""
        checkpoint = 0.0 if self._checkpointing is None else self._checkpointing.seconds
        return {**self._seconds, **self._rank_group.seconds, "checkpoint": checkpoint}

    def _second_facts(self) -> dict[str, float]:
        """Return seconds by stage since the last call, and since this session began."""
        totals, before = self.seconds, self._reported_seconds
        self._reported_seconds = totals
        of_update = {f"seconds/{name}": total - before.get(name, 0.0) for name, total in totals.items()}
        return of_update | {f"seconds_total/{name}": total for name, total in totals.items()}

    def _wait(self, what: str, subject: str) -> None:
        if self._waiting is None or self._waiting[:2] != (what, subject):  # keep the start of an ongoing wait
            self._waiting = (what, subject, bus_time())

    def status(self) -> dict[str, Any]:
        """Return the entry for this job in the worker's heartbeat."""
        row: dict[str, Any] = {
            "version": self.progress.version,
            "batch": self.progress.batch,
            "running": 0,
            "seconds": self.seconds,
            "transports": self._publishing.transports,
            "devices": self._publishing.devices,
        }
        if self._publishing.problem is not None:
            row |= {"problem_since": self._publishing.problem[0], "problem": self._publishing.problem[1]}
        writing = "" if self._checkpointing is None else self._checkpointing.writing
        if self._reporter.unanswered is not None:
            what, since = self._reporter.unanswered
            row |= {"waiting_for": what, "subject": subjects.report(self.job), "since": since}
        elif self._waiting is not None:
            what, subject, since = self._waiting
            row |= {"waiting_for": writing or what, "subject": subject, "since": since}
        elif (slot := self._publishing.waiting) is not None:
            since = bus_time() - (time.monotonic() - slot[1])
            row |= {"waiting_for": slot[0], "subject": subjects.MANIFESTS, "since": since}
        else:
            row["running"] = 1
        return row
