"""Start of a training session: from version 0, or from the state recorded in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.services.trainer.batch.inputs import Untrainable, read_manifests
from penstock.services.trainer.progress import Progress
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.rank_group import RankGroup
from penstock.services.trainer.reports import Reporter
from penstock.services.trainer.update_rules.on_policy import NonFiniteStep
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.config.service import checkpoint_path
from penstock.shared.errors import CheckpointError, Fenced, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Report
from penstock.shared.transport.bus import Bus

__all__ = ["Start"]

Wait = Callable[[str, str], None]
"""Callback ``(what the trainer waits for, subject)``, shown in status."""


class Start:
    """Brings the rank group and ``progress`` to the state in the ledger. Used once, under one lease."""

    def __init__(
        self, bus: Bus, job: str, config: AnyTraining, *, rank_group: RankGroup, publishing: Publishing,
        reporter: Reporter, progress: Progress, epoch: int, wait: Wait, data_dir: Path,
    ) -> None:  # fmt: skip
        self._bus, self._job, self._config = bus, job, config
        self._rank_group, self._publishing, self._reporter = rank_group, publishing, reporter
        self._progress, self._epoch, self._wait, self._data_dir = progress, epoch, wait, data_dir
        self.damaged = False
        """True if an older checkpoint was loaded because the newest one could not be read."""

    async def begin(self) -> None:
        """Run the warm start, if there is one, and publish version 0. The caller takes the checkpoint."""
        count, unit = self._warm_start
        if count:
            self._wait(f"the warm start: 0 of {count} {unit}", subjects.report(self._job))
            await self._rank_group.warm_start(self._on_warm_step)
        self._progress.batch, self._progress.version = 0, 0
        manifest = await self._publishing.publish(self._rank_group, version=0, epoch=self._epoch)
        self._progress.digest = manifest.digest
        await self._publishing.announce(manifest)

    async def restore(self, start: dict[str, Any]) -> None:
        """Load a checkpoint and repeat the updates that were made after it.

        Args:
            start: the coordinator's reply to `hello`.

        Raises:
            CheckpointError: no checkpoint can be read, or the restored weights are not those that the ledger records.
            Fenced: the ledger has changed since, or the checkpoint of a requested rollback cannot be read.
        """
        progress = self._progress
        progress.batch = await self._load(start)
        start["batches"] = [row for row in (*start.get("earlier", ()), *start["batches"]) if row[0] > progress.batch]
        await self._repeat(start)
        await self._rank_group.discard_snapshot()
        # The batches of this lineage may end earlier: a fork dropped the last ones, and their numbers are not reused.
        progress.batch, progress.version = start["last_trained"], start["version"]
        manifest = await self._publishing.publish(self._rank_group, version=progress.version, epoch=self._epoch)
        progress.digest = manifest.digest
        if start["digest"] and manifest.digest != start["digest"]:
            raise CheckpointError(f"weights after batch {progress.batch} do not hash to what the ledger recorded")
        await self._publishing.announce(manifest)

    async def _load(self, start: dict[str, Any]) -> int:
        """Load the checkpoint in ``start``, or the newest readable one before it. Return the number of the loaded
        checkpoint.

        If a user asked for a rollback to an unreadable checkpoint, the coordinator drops the rollback, and this raises
        Fenced.
        """
        first: CheckpointError | None = None
        for checkpoint in (start["checkpoint"], *start.get("older", ())):
            path = checkpoint_path(self._data_dir, checkpoint["path"])
            self._wait(f"checkpoint {path} to load", str(path))
            try:
                await self._rank_group.load(path)
            except CheckpointError as error:
                first = first or error
                if (start.get("rollback") or {}).get("operation"):
                    await self._reporter.ask(Report(kind="not_rolled_back", epoch=self._epoch, reason=str(error)))
                    raise Fenced(str(error)) from None
            else:
                await self._report_damaged(first, start["checkpoint"]["number"], checkpoint["number"])
                return int(checkpoint["number"])
        assert first is not None
        raise first

    async def _report_damaged(self, error: CheckpointError | None, wanted: int, found: int) -> None:
        if error is not None:
            self.damaged = True
            text = f"checkpoint {wanted} cannot be read, so training goes on from checkpoint {found}: {error}"
            await self._reporter.ask(Report(kind="fell_back", epoch=self._epoch, batch=wanted, reason=text))

    def _on_warm_step(self, step: int, loss: float) -> None:
        count, unit = self._warm_start
        self._wait(f"the warm start: {step} of {count} {unit}, loss {loss:.3f}", subjects.report(self._job))

    @property
    def _warm_start(self) -> tuple[int, str]:
        """Length of the warm start and its unit; 0: no warm start."""
        if isinstance(self._config, JobConfig):
            return self._config.warm_start.steps, "steps"
        warm = self._config.warm_start if isinstance(self._config, EmbodiedJob) else None
        return 0 if warm is None else warm.epochs, "passes"

    async def _repeat(self, start: dict[str, Any]) -> None:
        """Train again the batches after the checkpoint and compare their digests with the ledger.

        If engines serve a version older than the last, it is published again as soon as training reaches it. If the
        coordinator requests a rollback to an earlier batch, training stops after that batch, and the lineage forks.
        """
        manifests = await read_manifests(self._bus, self._job)
        served, rollback = start.get("served"), start.get("rollback")
        for number, revision, version, digest in start["batches"]:
            if rollback is not None and number > rollback["number"]:
                await self._fork(number, start, rollback["reason"], rollback=rollback["number"])
                return
            if served is not None and number > served["number"]:
                shown = await self._publishing.publish(self._rank_group, version=served["version"], epoch=self._epoch)
                await self._publishing.announce_served(shown)
                served = None
            self._wait(
                f"batch {number} of {start['last_trained']} to be repeated after a restart", subjects.batches(self._job)
            )
            await self._rank_group.snapshot()
            try:
                await self._rank_group.train(manifests[number, revision])
            except (KeyError, Untrainable) as error:
                bad = error.bad if isinstance(error, Untrainable) else []
                await self._fork(number, start, f"inputs of batch {number} are gone: {error}", bad=bad)
                return
            except (ProtocolError, NonFiniteStep) as error:
                await self._rank_group.restore()
                await self._fork(number, start, f"batch {number} cannot be trained again: {error}")
                return
            again = await self._publishing.publish(self._rank_group, version=version, epoch=self._epoch)
            if again.digest != digest:
                await self._rank_group.restore()
                await self._fork(number, start, f"batch {number} gave another weight digest than before")
                return
            self._progress.batch = number

    async def _fork(
        self, number: int, start: dict[str, Any], reason: str, *, rollback: int | None = None, bad: Sequence[Draw] = ()
    ) -> None:
        """Discard the recorded updates from batch ``number`` on, and start a new lineage (series of updates) from the
        state before this batch. Publish this state under a version above all published ones.

        Args:
            bad: draws of the batch whose groups are gone; the coordinator knows which of them a deletion removed.
            rollback: batch of the rollback that the coordinator requested, if any. The coordinator refuses the fork if
                it no longer wants the rollback.
        """
        version = max(start["version"], await self._publishing.newest()) + 1
        manifest = await self._publishing.publish(self._rank_group, version=version, epoch=self._epoch)
        report = Report(
            kind="forked", epoch=self._epoch, batch=number, version=version, digest=manifest.digest, reason=reason,
            rollback=rollback, bad=list(bad),
        )  # fmt: skip
        await self._reporter.ask(report)
        start["version"], start["digest"] = version, manifest.digest
