"""Replay: repeat the trained batches of a job from a checkpoint and compare every weight digest with the ledger.

In an environment other than that of the training, digests differ; the replay then compares gradient norms and weights.

Command: ``python -m penstock.services.trainer.replay JOB REQUEST_ID [FROM_BATCH] [TO_BATCH]``. Progress rows go to
``subjects.replay_progress(REQUEST_ID)``. No engine is needed: prompts, tokens and rewards come from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from penstock.services.trainer.batch.inputs import Untrainable, read_manifests
from penstock.services.trainer.checkpoint.state import read_manifest
from penstock.services.trainer.environment import environment_differences
from penstock.services.trainer.learners.job_learner import JobLearner
from penstock.services.trainer.learners.replay_tolerance import ReplayTolerance, copy_weights
from penstock.services.trainer.ranks.heartbeats import Threads, meet
from penstock.services.trainer.ranks.process_group import Place
from penstock.services.trainer.replica import Replica
from penstock.shared.config.backend import MegatronConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyTraining, parse_training
from penstock.shared.config.service import CHECKPOINTS, ServiceSettings, checkpoint_path, load_settings
from penstock.shared.errors import CheckpointError, NotFound, PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.events import BatchTrained, Checkpointed, JobStarted, LineageForked, decode_events
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import ReplayRow
from penstock.shared.runtime.ledger import ledger_archive, read_ledger
from penstock.shared.transport.bus import Bus
from penstock.shared.weights.flat import fill

__all__ = ["Recorded", "Replay"]

NO_BASE = "no checkpoint is left from which these batches could be repeated"
_Base = tuple[Checkpointed, list[Checkpointed], list[str]]
GRADIENT_NORMS = ("optimizer/grad_norm", "policy/grad_norm", "actor/grad_norm")
"""Metric names under which the update rules report the norm of the policy's gradient."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records of the original training besides digests: gradient norms by batch, and checkpoints."""

    gradient_norms: dict[int, float | None]
    checkpoints: dict[int, Path]

    async def compare(
        self, tolerance: ReplayTolerance, replica: Replica, number: int, metrics: Mapping[str, float]
    ) -> list[str]:
        """Compare the replayed batch ``number`` with the records, and return the results as text.

        Loads a checkpoint of the original training if there is one after this batch; then restores the replica's state.
        """
        found = [tolerance.gradient(_gradient_norm(metrics), self.gradient_norms.get(number))]
        if number in self.checkpoints:
            replayed = await replica.write(copy_weights)
            await replica.snapshot()
            try:
                await replica.load(self.checkpoints[number])
                found.append(tolerance.checkpoint(number, replayed, await replica.write(copy_weights)))
            except CheckpointError as error:
                found.append(str(error))
            await replica.restore()
        return [text for text in found if text]


class Replay:
    """Runs one replay of one job."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, request: str) -> None:
        self._bus, self._settings, self._job, self._request = bus, settings, job, request

    async def run(self, from_batch: int | None, to_batch: int | None) -> bool:
        """Replay and report. Return True if all digests match or, in another environment, all deviations are small."""
        try:
            done = await self._run(from_batch, to_batch)
        except PenstockError as error:
            done = ReplayRow(done=True, ok=False, summary=str(error))
        await self._report(done)
        return done.ok

    async def _run(self, from_batch: int | None, to_batch: int | None) -> ReplayRow:
        entry = await self._bus.kv(subjects.JOBS).get(self._job)
        if entry is None or entry.value is None:
            raise NotFound(f"no job '{self._job}'")
        config = parse_training(JobRecord.model_validate_json(entry.value).spec)
        torch.set_num_threads(config.placement.trainer_threads)
        trained, checkpoints, simulator = await self._ledger()
        manifests = await read_manifests(self._bus, self._job)
        low = max((c.low_seq for c in checkpoints), default=0)
        logged = {n: manifests.get((n, event.revision)) for n, event in trained.items()}
        purged = max((n for n, m in logged.items() if m is None or any(g.seq < low for g in m.groups)), default=0)
        last = min(to_batch, max(trained, default=0)) if to_batch is not None else max(trained, default=0)
        bases = self._bases(checkpoints, from_batch, purged)
        if not bases:
            raise CheckpointError(NO_BASE)
        replica = await self._open(config, simulator)
        base, skipped, errors = await self._load_base(replica, bases)
        checkpoints = [c for c in checkpoints if c not in skipped]
        unusable = "".join(f"; {error}" for error in errors)
        compare = partial(_digest, np.zeros(replica.learner.layout().nbytes, np.uint8))
        pins = read_manifest(self._path(base)).manifest.environment
        written = [self._path(c) for c in (base, *(c for c in checkpoints if base.number < c.number))]
        differences = _differences(written, replica.learner.environment())
        recorded = await self._recorded(checkpoints) if differences else None
        tolerance = ReplayTolerance(await replica.write(copy_weights) if differences else {}, pins.get("dtype", ""))
        same = total = 0
        for number in (n for n in sorted(trained) if base.number < n <= last):
            event = trained[number]
            try:
                shard = await replica.fetch(manifests[number, event.revision], None)
            except (KeyError, Untrainable) as error:
                return ReplayRow(done=True, ok=False, summary=f"the log of batch {number} is gone: {error}{unusable}")
            metrics = await replica.update(shard, update_index=manifests[number, event.revision].update_index)
            digest = await replica.write(compare)
            match, total = digest == event.digest, total + 1
            same += match
            row = ReplayRow(batch=number, total=last, match=match, detail=digest)
            if recorded is not None and not match:
                found = await recorded.compare(tolerance, replica, number, metrics)
                row = msgspec.structs.replace(row, near=tolerance.within, detail="; ".join([digest, *found]))
            await self._report(row)
        summary = f"{same} of {total} updates after checkpoint {base.number} gave the same weight digest{unusable}"
        if differences:
            summary += f"; another environment ({', '.join(differences)}) gives other bits"
        if differences and same < total:
            summary += f"; {tolerance.summary()}"
        ok = (same == total and (total > 0 or not skipped)) or (
            bool(differences) and tolerance.compared and tolerance.within
        )
        return ReplayRow(done=True, ok=ok, total=total, summary=summary)

    async def _recorded(self, checkpoints: list[Checkpointed]) -> Recorded:
        messages = await self._bus.read(subjects.METRICS, subjects.metrics(self._job))
        rows = [msgspec.json.decode(message.data) for message in messages]
        norms = {row["step"]: _gradient_norm(row["values"]) for row in rows if row["kind"] == "train"}
        return Recorded(norms, {c.number: self._path(c) for c in checkpoints if self._exists(c)})

    async def _open(self, config: AnyTraining, simulator: EnvSpec | None) -> Replica:
        """Open the job in this process alone. A backend that shards the model gets one rank."""
        settings = self._settings
        if isinstance(config, JobConfig) and isinstance(config.backend, MegatronConfig):
            config = config.model_copy(update={"backend": config.backend.on_one_rank()})
        cut = config.backend.type != "local"
        ranks = await meet(Place(), deadline_s=settings.rank_deadline_s) if cut else None
        replica = Replica(
            self._bus, self._job, config, world=None if ranks is None else ranks.world,
            threads=Threads() if ranks is None else ranks.threads, checkpoints=settings.data_dir / CHECKPOINTS,
        )  # fmt: skip
        await replica.open(simulator)
        return replica

    async def _ledger(self) -> tuple[dict[int, BatchTrained], list[Checkpointed], EnvSpec | None]:
        """Read the ledger. Return three things: the updates by batch number, the checkpoints, and the properties of the
        simulator of an embodied job (otherwise None). Updates and checkpoints that a fork (a return to an earlier
        batch) undid are left out."""
        trained: dict[int, BatchTrained] = {}
        simulator: EnvSpec | None = None
        checkpoints: list[Checkpointed] = []
        for message in await read_ledger(self._bus, self._job, ledger_archive(self._settings.data_dir)):
            for event in decode_events(message.data):
                if isinstance(event, JobStarted) and event.environment:
                    simulator = msgspec.convert(event.environment, EnvSpec)
                elif isinstance(event, BatchTrained):
                    trained[event.number] = event
                elif isinstance(event, Checkpointed):
                    checkpoints.append(event)
                elif isinstance(event, LineageForked):
                    trained = {n: e for n, e in trained.items() if n < event.from_batch}
                    checkpoints = [c for c in checkpoints if c.number < event.from_batch]
        return trained, checkpoints, simulator

    def _bases(self, checkpoints: list[Checkpointed], from_batch: int | None, purged: int) -> list[Checkpointed]:
        """Return the checkpoints at which the replay can begin, in the order in which it should try to load them.

        With ``from_batch``, these are the checkpoints before that batch, newest first. Without it, these are the
        checkpoints whose later batches are all in the log, oldest first; if there is none, the newest checkpoint.

        Args:
            purged: the last batch that lost groups to a purge.
        """
        kept = [c for c in checkpoints if self._exists(c)]
        if from_batch is not None:
            return [c for c in reversed(kept) if c.number < from_batch]
        return [c for c in kept if c.number >= purged] or kept[-1:]

    async def _load_base(self, replica: Replica, bases: list[Checkpointed]) -> _Base:
        """Load the first of ``bases`` that can be loaded.

        Returns:
            the loaded checkpoint, the ones before it, and their errors.

        Raises:
            CheckpointError: no checkpoint can be loaded.
        """
        errors: list[str] = []
        for position, base in enumerate(bases):
            try:
                await replica.load(self._path(base))
            except CheckpointError as error:
                errors.append(str(error))
            else:
                return base, bases[:position], errors
        raise CheckpointError("; ".join([NO_BASE, *errors]))

    def _path(self, checkpoint: Checkpointed) -> Path:
        return checkpoint_path(self._settings.data_dir, checkpoint.path)

    def _exists(self, checkpoint: Checkpointed) -> bool:
        return (self._path(checkpoint) / "COMMIT").exists()

    async def _report(self, row: ReplayRow) -> None:
        await self._bus.notify(subjects.replay_progress(self._request), pack(row, job=self._job))


def _differences(written: list[Path], here: dict[str, str]) -> list[str]:
    """Return, without duplicates, how environment ``here`` differs from the environments that wrote the checkpoints."""
    found: dict[str, None] = {}
    for path in written:
        with contextlib.suppress(CheckpointError):  # a damaged manifest names no environment
            found |= dict.fromkeys(environment_differences(read_manifest(path).manifest.environment, here))
    return list(found)


def _gradient_norm(metrics: Mapping[str, float]) -> float | None:
    return next((metrics[name] for name in GRADIENT_NORMS if name in metrics), None)


def _digest(buffer: NDArray[np.uint8], learner: JobLearner) -> str:
    """Return the digest of the weights as they would be published."""
    return fill(buffer, learner.layout(), learner.weights())


async def main(job: str, request: str, from_batch: int | None, to_batch: int | None) -> int:
    """Connect to the bus, run the replay and return the exit code."""
    settings = load_settings()
    async with await Bus.connect(settings.nats_url, name=f"replay-{request}", tls=settings.nats_tls) as bus:
        return 0 if await Replay(bus, settings, job, request).run(from_batch, to_batch) else 1


if __name__ == "__main__":
    numbers = [int(text) if text else None for text in (*sys.argv[3:5], "", "")][:2]
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], numbers[0], numbers[1])))
