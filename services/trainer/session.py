"""One job on one trainer: where exactly-once lives.

The checkpoint holds weights, optimizer, RNG, batch number and version. A restarted trainer loads the newest one that
the ledger knows, repeats the batches trained after it and compares each weight digest with the ledger; only then it
goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from penstock.services.trainer.checkpoint import load_checkpoint, retain, save_checkpoint
from penstock.services.trainer.inputs import BatchInputs, Untrainable, fetch_groups, read_manifests
from penstock.services.trainer.learner import Learner, open_learner
from penstock.services.trainer.reports import Reporter
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.prompts import PromptSource
from penstock.shared.errors import CheckpointError, ConfigError, DataError, Fenced, ProtocolError
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.ids import derive_seed
from penstock.shared.protocol.messages import Ack, BatchManifest, Command, Report
from penstock.shared.protocol.trajectory import Group
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.runtime.lease import Lease
from penstock.shared.runtime.tasks import raise_if_cancelled
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import WeightPublisher, layout_of, open_publisher

__all__ = ["TrainerSession"]

logger = logging.getLogger(__name__)

RESTART_S = 0.5


class TrainerSession:
    """Holds the trainer lease of a job and trains its sealed batches, one after another."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, config: JobConfig) -> None:
        self._bus, self._settings, self.job, self.config = bus, settings, job, config
        self._reporter = Reporter(bus, job)
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._learner: Learner | None = None
        self._publisher: WeightPublisher | None = None
        self._inputs: BatchInputs | None = None
        self._checkpoint_asked = asyncio.Event()
        self._waiting: tuple[str, str, float] | None = None
        self._epoch = 0
        self._draining = False
        self.version = -1
        self.batch = 0
        self.digest = ""
        self.seconds = dict.fromkeys(("wait", "fetch", "update", "publish", "checkpoint"), 0.0)

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until cancelled. Starts over whenever the ledger or the lease says so."""
        try:
            while not self._draining:
                self._wait("the trainer lease of this job", subjects.LEASES)
                lease = Lease(
                    self._bus, f"trainer.{self.job}", holder=self._settings.worker_id, lease_s=self._settings.lease_s
                )
                self._epoch = await lease.acquire()
                try:
                    await self._hold(lease)
                except* Fenced as group:
                    logger.warning("starting over: %s", group.exceptions[0])
                finally:
                    await lease.release()
                raise_if_cancelled()
                await asyncio.sleep(0 if self._draining else RESTART_S)
        finally:
            if self._publisher is not None:
                self._publisher.close()
            self._torch.shutdown(wait=False, cancel_futures=True)

    async def _hold(self, lease: Lease) -> None:
        self._reporter = Reporter(self._bus, self.job)  # what an earlier lease left unsaid is not true any more
        self._checkpoint_asked.clear()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(lease.keep())
            try:
                await self._train()
            except (ConfigError, DataError, CheckpointError) as error:
                await self._reporter.ask(Report(kind="failed", epoch=self._epoch, reason=str(error)))
                await asyncio.Event().wait()  # the coordinator ends the job, and with it this session
            keeping.cancel()

    async def _train(self) -> None:
        start = await self._hello()
        self._learner = await self._in_thread(partial(open_learner, self.config))
        await self._restore(start)
        async with asyncio.TaskGroup() as tasks:
            self._inputs = BatchInputs(self._bus, self.job, max_lag=self.config.train.max_lag, last_trained=self.batch)
            background = [tasks.create_task(self._inputs.run()), tasks.create_task(self._reporter.run())]
            server = await self._bus.serve(subjects.command(self.job), self._on_command)
            try:
                while not self._draining:
                    await self._step()
                await self._reporter.settled()
            finally:
                await server.close(0.5)
                for task in background:
                    task.cancel()

    def drain(self) -> None:
        """Stop at the next step boundary."""
        self._draining = True
        self._checkpoint_asked.set()
        if self._inputs is not None:
            self._inputs.arrived.set()

    async def _in_thread(self, work: Any) -> Any:
        """Run torch work in the one thread that owns the model."""
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    # -- where to start ----------------------------------------------------------------------------------------------

    async def _hello(self) -> dict[str, Any]:
        self._wait("the coordinator to say where to start", subjects.report(self.job))
        return await self._reporter.ask(Report(kind="hello", epoch=self._epoch))

    async def _restore(self, start: dict[str, Any]) -> None:
        checkpoint = start["checkpoint"]
        if checkpoint is None:
            await self._begin()
            return
        assert self._learner is not None
        self._wait(f"checkpoint {checkpoint['path']} to load", checkpoint["path"])
        loaded = await self._in_thread(partial(load_checkpoint, Path(checkpoint["path"])))
        await self._in_thread(partial(self._learner.load_state, loaded.state))
        self.batch = checkpoint["number"]
        await self._repeat(start)
        self.version = start["version"]
        manifest = await self._publish_weights(start["version"], announce=False)
        if start["digest"] and manifest.digest != start["digest"]:
            raise CheckpointError(f"weights after batch {self.batch} do not hash to what the ledger recorded")
        await self._announce(manifest)

    async def _begin(self) -> None:
        """Version 0: warm start, checkpoint, publish."""
        assert self._learner is not None
        warm = self.config.warm_start
        if warm.steps:
            self._wait(f"the warm start: 0 of {warm.steps} steps", subjects.report(self.job))
            await self._in_thread(self._warm_start)
        self.batch, self.version = 0, 0
        await self._publish_weights(0)
        await self._checkpoint()

    def _warm_start(self) -> None:
        assert self._learner is not None
        warm = self.config.warm_start
        source = PromptSource(self.config.warm_start_data, build_tokenizer(self.config.model), self.config.seed)
        batches = source.warm_start_batches(warm.batch_size, warm.steps, derive_seed(self.config.seed, "warm_start"))

        def on_step(step: int, loss: float) -> None:
            self._wait(f"the warm start: {step} of {warm.steps} steps, loss {loss:.3f}", subjects.report(self.job))

        self._learner.warm_start(batches, on_step)

    async def _repeat(self, start: dict[str, Any]) -> None:
        """Train again what was trained after the checkpoint; the digests must come out as the ledger has them."""
        manifests = await read_manifests(self._bus, self.job)
        for number, revision, version, digest in start["batches"]:
            self._wait(
                f"batch {number} of {start['last_trained']} to be repeated after a restart", subjects.batches(self.job)
            )
            try:
                manifest = manifests[number, revision]
                groups = await fetch_groups(self._bus, manifest, max_lag=self.config.train.max_lag)
            except (KeyError, Untrainable) as error:
                await self._fork(number, start, f"inputs of batch {number} are gone: {error}")
                return
            before = await self._in_thread(self._state)
            await self._update(manifest, groups)
            again = (await self._publish_weights(version, announce=False)).digest
            if again != digest:
                await self._in_thread(partial(self._load_state, before))
                await self._fork(number, start, f"batch {number} gave another weight digest than before")
                return
            self.batch = number

    def _state(self) -> Any:
        assert self._learner is not None
        return self._learner.state()

    def _load_state(self, state: Any) -> None:
        assert self._learner is not None
        self._learner.load_state(state)

    async def _fork(self, number: int, start: dict[str, Any], reason: str) -> None:
        """The lineage cannot be reproduced: go on above the clock from the last good batch."""
        version = start["version"] + 1
        manifest = await self._publish_weights(version, announce=False)
        report = Report(
            kind="forked", epoch=self._epoch, batch=number, version=version, digest=manifest.digest, reason=reason
        )
        await self._reporter.ask(report)
        self.batch = start["last_trained"]
        start["version"], start["digest"] = version, manifest.digest

    # -- steps -------------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """Train the next batch when it is sealed, or checkpoint when asked."""
        assert self._inputs is not None
        began = time.perf_counter()
        manifest = await self._next_manifest()
        if manifest is None:
            return
        self.seconds["wait"] += time.perf_counter() - began
        try:
            began = time.perf_counter()
            groups = await self._inputs.groups(manifest)
            if manifest.start_version != self.version:
                raise Fenced(
                    f"batch {manifest.number} starts from {manifest.start_version}, this trainer is at {self.version}"
                )
        except Untrainable as error:
            await self._refuse(manifest, error)
            return
        self.seconds["fetch"] += time.perf_counter() - began
        await self._train_batch(manifest, groups)

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

    async def _next_manifest(self) -> BatchManifest | None:
        assert self._inputs is not None
        number = self.batch + 1
        if self._checkpoint_asked.is_set() and not self._draining:
            self._checkpoint_asked.clear()
            await self._checkpoint()
        manifest = self._inputs.peek(number)
        if manifest is None:
            self._wait(f"batch {number} to be sealed", subjects.batches(self.job))
            await self._inputs.arrived.wait()
            self._inputs.arrived.clear()
            manifest = self._inputs.peek(number)
        return manifest

    async def _train_batch(self, manifest: BatchManifest, groups: list[Group]) -> None:
        assert self._inputs is not None
        self._waiting = None
        try:
            metrics = await self._update(manifest, groups)
        except ProtocolError as error:
            await self._refuse(manifest, Untrainable([group.draw for group in manifest.groups], str(error)))
            return
        self.version = manifest.start_version + 1
        published = await self._publish_weights(self.version)
        self.batch = manifest.number
        self._inputs.trained(manifest)
        metrics |= {
            "lag/max": float(manifest.start_version - min(group.min_version for group in manifest.groups)),
            "tokens/trained": float(sum(group.tokens for group in manifest.groups)),
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
        }
        await self._reporter.post(
            Report(
                kind="trained", epoch=self._epoch, batch=manifest.number, revision=manifest.revision,
                version=self.version, digest=published.digest, metrics=metrics,
            )
        )  # fmt: skip

    async def _update(self, manifest: BatchManifest, groups: list[Group]) -> dict[str, float]:
        assert self._learner is not None
        began = time.perf_counter()
        metrics = await self._in_thread(partial(self._learner.update, groups, update_index=manifest.update_index))
        self.seconds["update"] += time.perf_counter() - began
        return dict(metrics)

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    async def _publish_weights(self, version: int, *, announce: bool = True) -> WeightManifest:
        began = time.perf_counter()
        manifest: WeightManifest = await self._in_thread(partial(self._write_weights, version))
        self.digest = manifest.digest
        if announce:
            await self._announce(manifest)
        self.seconds["publish"] += time.perf_counter() - began
        return manifest

    def _write_weights(self, version: int) -> WeightManifest:
        assert self._learner is not None
        if self._publisher is None:
            self._publisher = open_publisher(self.job, layout_of(self._learner.weights()), self._settings)
        return self._publisher.publish(self._learner.weights(), version=version, epoch=self._epoch)

    async def _announce(self, manifest: WeightManifest) -> None:
        data = pack(manifest, job=self.job, id=str(manifest.version), epoch=self._epoch)
        await self._bus.kv(subjects.MANIFESTS).put(self.job, data, deadline_s=30)

    async def _checkpoint(self) -> None:
        began = time.perf_counter()
        self._wait(f"checkpoint after batch {self.batch} to be written and recorded", subjects.report(self.job))
        number, version, digest = self.batch, self.version, self.digest
        root = self._settings.data_dir / "checkpoints"
        meta = {"version": version, "epoch": self._epoch, "digest": digest}
        path = await self._in_thread(partial(self._save, root, number, meta))
        await self._reporter.settled()
        await self._reporter.ask(
            Report(kind="checkpointed", epoch=self._epoch, batch=number, version=version, digest=digest, path=str(path))
        )
        await asyncio.to_thread(retain, root, self.job, keep=self.config.checkpoint.keep, pinned={0})
        self.seconds["checkpoint"] += time.perf_counter() - began

    def _save(self, root: Path, number: int, meta: dict[str, Any]) -> Path:
        assert self._learner is not None
        return save_checkpoint(
            root, self.job, number, self._learner.state(), {**meta, "config": self.config.model_dump_json()}
        )

    async def _on_command(self, data: bytes) -> bytes:
        command, _ = unpack(data, Command)
        if command.kind == "checkpoint":
            self._checkpoint_asked.set()
            if self._inputs is not None:
                self._inputs.arrived.set()
        return pack(Ack(ok=True), job=self.job, epoch=self._epoch)

    # -- what others see ---------------------------------------------------------------------------------------------

    def _wait(self, what: str, subject: str) -> None:
        self._waiting = (what, subject, time.time())

    def status(self) -> dict[str, Any]:
        """This worker's entry for the job, for its heartbeat."""
        row: dict[str, Any] = {
            "version": self.version,
            "batch": self.batch,
            "running": 0,
            "seconds": dict(self.seconds),
        }
        if self._reporter.unanswered:
            row |= {
                "waiting_for": self._reporter.unanswered,
                "subject": subjects.report(self.job),
                "since": time.time(),
            }
        elif self._waiting is not None:
            what, subject, since = self._waiting
            row |= {"waiting_for": what, "subject": subject, "since": since}
        else:
            row["running"] = 1
        return row
