"""Repeat the trained batches of a job from a retained checkpoint and compare every weight digest with the ledger.

``python -m penstock.services.trainer.replay JOB REQUEST_ID [FROM_BATCH] [TO_BATCH]``; rows of progress go to
``subjects.replay_progress(REQUEST_ID)``. Needs no engine: prompts, tokens and rewards come from the log.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch

from penstock.services.trainer.checkpoint import load_checkpoint, read_manifest
from penstock.services.trainer.environment import environment_differences
from penstock.services.trainer.inputs import Untrainable, fetch_groups, read_manifests
from penstock.services.trainer.learner import open_learner
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import load_settings
from penstock.shared.errors import CheckpointError, NotFound, PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import BatchTrained, Checkpointed, LineageForked, decode_events
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import ReplayRow
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import layout_of
from penstock.shared.weights.flat import fill

__all__ = ["Replay"]


class Replay:
    """One replay of one job."""

    def __init__(self, bus: Bus, job: str, request: str) -> None:
        self._bus, self._job, self._request = bus, job, request

    async def run(self, from_batch: int | None, to_batch: int | None) -> bool:
        """Replay and report; returns whether every digest came out the same."""
        try:
            done = await self._run(from_batch, to_batch)
        except PenstockError as error:
            done = ReplayRow(done=True, ok=False, summary=str(error))
        await self._tell(done)
        return done.ok

    async def _run(self, from_batch: int | None, to_batch: int | None) -> ReplayRow:
        entry = await self._bus.kv(subjects.JOBS).get(self._job)
        if entry is None or entry.value is None:
            raise NotFound(f"no job '{self._job}'")
        config = JobConfig.parse(JobRecord.model_validate_json(entry.value).spec)
        torch.set_num_threads(config.placement.trainer_threads)
        trained, checkpoints = await self._ledger()
        manifests = await read_manifests(self._bus, self._job)
        low = max((c.low_seq for c in checkpoints), default=0)
        batches = [manifests[n, e.revision] for n, e in trained.items() if (n, e.revision) in manifests]
        purged = max((m.number for m in batches if any(g.seq < low for g in m.groups)), default=0)
        base = self._base(checkpoints, from_batch, purged)
        last = min(to_batch, max(trained, default=0)) if to_batch is not None else max(trained, default=0)
        learner = open_learner(config)
        learner.load_state(load_checkpoint(Path(base.path)).state)
        layout = layout_of(learner.weights())
        buffer = np.zeros(layout.nbytes, np.uint8)
        same = total = 0
        for number in range(base.number + 1, last + 1):
            event = trained[number]
            try:
                groups = await fetch_groups(self._bus, manifests[number, event.revision], max_lag=config.train.max_lag)
            except (KeyError, Untrainable) as error:
                return ReplayRow(done=True, ok=False, summary=f"the log of batch {number} is gone: {error}")
            learner.update(groups, update_index=manifests[number, event.revision].update_index)
            digest = fill(buffer, layout, learner.weights())
            match, total = digest == event.digest, total + 1
            same += match
            await self._tell(ReplayRow(batch=number, total=last, match=match, detail=digest))
        summary = f"{same} of {total} updates after checkpoint {base.number} gave the same weight digest"
        pins = read_manifest(Path(base.path)).manifest.environment
        differences = environment_differences(pins, learner.environment())
        if differences:
            summary += "; different environment, so other bits are expected: " + ", ".join(differences)
        return ReplayRow(done=True, ok=same == total, total=total, summary=summary)

    async def _ledger(self) -> tuple[dict[int, BatchTrained], list[Checkpointed]]:
        trained: dict[int, BatchTrained] = {}
        checkpoints: list[Checkpointed] = []
        for message in await self._bus.read(subjects.LEDGER, subjects.ledger(self._job)):
            for event in decode_events(message.data):
                if isinstance(event, BatchTrained):
                    trained[event.number] = event
                elif isinstance(event, Checkpointed):
                    checkpoints.append(event)
                elif isinstance(event, LineageForked):
                    trained = {n: e for n, e in trained.items() if n < event.from_batch}
                    checkpoints = [c for c in checkpoints if c.number < event.from_batch]
        return trained, checkpoints

    def _base(self, checkpoints: list[Checkpointed], from_batch: int | None, purged: int) -> Checkpointed:
        """The newest checkpoint before ``from_batch``; without one the oldest whose log is still there.

        ``purged`` is the last batch that lost groups to a purge.
        """
        kept = [c for c in checkpoints if (Path(c.path) / "COMMIT").exists()]
        if from_batch is not None:
            kept = [c for c in kept if c.number < from_batch][-1:]
        else:
            kept = [c for c in kept if c.number >= purged] or kept[-1:]
        if not kept:
            raise CheckpointError("no checkpoint is left from which these batches could be repeated")
        return kept[0]

    async def _tell(self, row: ReplayRow) -> None:
        await self._bus.notify(subjects.replay_progress(self._request), pack(row, job=self._job))


async def main(job: str, request: str, from_batch: int | None, to_batch: int | None) -> int:
    """Connect, replay, disconnect."""
    settings = load_settings()
    async with await Bus.connect(settings.nats_url, name=f"replay-{request}") as bus:
        return 0 if await Replay(bus, job, request).run(from_batch, to_batch) else 1


if __name__ == "__main__":
    numbers = [int(text) if text else None for text in (*sys.argv[3:5], "", "")][:2]
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], numbers[0], numbers[1])))
