"""What the HTTP API reads of the streams: the fold of a finished job, and the audit in bounded portions."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.services.coordinator import control as control_module
from penstock.services.coordinator.control import CoordinatorControl, chunks_of, largest_size
from penstock.services.coordinator.journal import Journal
from penstock.services.coordinator.members import Members
from penstock.services.coordinator.store import JobStore
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Checkpointed, Finished, JobStarted, SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.transport.bus import Bus

CONFIG = JobConfig.parse(
    {
        "name": "shown",
        "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "train": {"batch_size": 16, "max_updates": 1},
    }
)


async def job_of(bus: Bus, *, phase: str) -> str:
    """A job with an initial checkpoint, in the ledger finished or not as its phase says."""
    store = JobStore(bus)
    job = (await store.create(CONFIG)).id
    journal = Journal(bus, job)
    await journal.load()
    await journal.append([JobStarted(writer_epoch=1, time=0.0, config_digest="c")])
    await journal.append(
        [
            Checkpointed(
                writer_epoch=1, time=0.0, number=0, version=0, digest="w", path="/gone", trainer_epoch=1, low_seq=0
            )
        ]
    )  # fmt: skip
    if phase != "running":
        await journal.append([Finished(writer_epoch=1, time=0.0, reason=phase, summary={})])
    await store.set_status(job, phase=phase, finished_at=datetime.now(UTC) if phase != "running" else None)
    return job


async def test_a_finished_ledger_is_folded_once(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "KEPT_STATES", 2)
    control = CoordinatorControl(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=tmp_path))
    jobs = [await job_of(bus, phase="succeeded") for _ in range(3)]
    running = await job_of(bus, phase="running")
    for job in [*jobs, running]:
        assert [row["number"] for row in await control.checkpoints(job)] == [0]
        await bus.purge(subjects.LEDGER, subjects.ledger(job))  # only to see who reads it again
    assert [len(await control.checkpoints(job)) for job in reversed([*jobs, running])] == [0, 1, 1, 0]


def test_the_audit_reads_portions_bounded_in_bytes() -> None:
    mib = 1 << 20
    assert chunks_of({1: 60 * mib, 2: 4 * mib, 3: 1, 4: 65 * mib, 5: mib}) == [[1, 2], [3], [4], [5]]
    assert chunks_of({}) == []
    full = CONFIG.completions_per_group * CONFIG.sampling.max_new_tokens
    group = SealedGroup(Draw(0), "a", 1, "d", 0, 0, [1.0], full, "w")
    assert largest_size(CONFIG, group) == CONFIG.max_group_bytes
