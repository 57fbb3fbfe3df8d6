"""Operations in the record of a job: each ends once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from penstock.services.coordinator.leader.desired_state import DesiredState
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.amendable import settings_of, with_patch
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.events import Checkpointed, JobStarted
from penstock.shared.protocol.jobs import JobRecord, Operation

SPEC = {
    "name": "desired",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 3},
}


def record(*operations: Operation) -> JobRecord:
    return JobRecord(id="job_1", name="desired", created_at=datetime.now(UTC), spec=SPEC, operations=list(operations))


def operation(id: str) -> Operation:
    return Operation(id=id, kind="checkpoint", created_at=datetime.now(UTC))


def checkpoint(number: int) -> Checkpointed:
    return Checkpointed(
        writer_epoch=1,
        time=0.0,
        number=number,
        version=number,
        digest="d",
        path=f"c{number}",
        trainer_epoch=1,
        low_seq=0,
    )


def test_an_operation_waits_for_the_updates_before_it() -> None:
    run = JobRun(JobConfig.parse(SPEC), LedgerState(), num_ordinals=None, writer_epoch=1)
    desired = DesiredState(record())
    assert not desired.wants_checkpoint
    run.state.last_trained, run.state.checkpoint = 5, checkpoint(3)
    desired.update(record(operation("a")))
    assert desired.wants_checkpoint
    assert desired.settle(run) == []
    run.state.last_trained, run.state.checkpoint = 7, checkpoint(5)
    (done,) = desired.settle(run)
    assert (done.id, done.state, done.result) == ("a", "succeeded", {"number": 5, "path": "c5"})
    assert desired.settle(run) == [], "returned once, though the record does not change yet"
    assert not desired.wants_checkpoint


def test_the_end_of_the_job_ends_waiting_operations() -> None:
    run = JobRun(JobConfig.parse(SPEC), LedgerState(), num_ordinals=None, writer_epoch=1)
    run.state.last_trained, run.state.checkpoint, run.state.finished = 5, checkpoint(3), "failed"
    (done,) = DesiredState(record(operation("a"))).settle(run)
    assert (done.state, done.message) == ("failed", "the job failed before")


def changed(generation: int, patch: dict[str, Any]) -> JobRecord:
    return record().model_copy(update={"generation": generation, "spec": with_patch(SPEC, patch)})


def test_only_the_change_of_a_setting_applies_at_a_step() -> None:
    config = JobConfig.parse(SPEC)
    run = JobRun(config, LedgerState(), num_ordinals=None, writer_epoch=1)
    run.commit([JobStarted(writer_epoch=1, time=0.0, config_digest="c", settings=settings_of(config))])
    desired = DesiredState(changed(2, {"train": {"max_updates": 5}}))
    run.commit(desired.amend(run, 1.0))
    assert (desired.followed, desired.applies_at_step(run.state)) == (2, 1)
    desired.update(changed(3, {"train": {"max_updates": 5}, "metadata": {"team": "a"}}))
    assert desired.amend(run, 1.0) == []
    assert (desired.followed, desired.applies_at_step(run.state)) == (3, None)
    desired.update(changed(4, {"train": {"max_updates": 5, "unknown": 1}}))
    assert desired.amend(run, 1.0) == []
    assert desired.followed == 3, "what cannot be read is not followed"
