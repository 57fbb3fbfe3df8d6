"""Operations of a job's record: when they are over, told once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.run import JobRun
from penstock.services.coordinator.wishes import Wishes
from penstock.shared.config.amendable import settings_of, with_patch
from penstock.shared.config.job import JobConfig
from penstock.shared.protocol.events import Checkpointed, JobStarted
from penstock.shared.protocol.jobs import JobRecord, Operation

SPEC = {
    "name": "wished",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 3},
}


def record(*operations: Operation) -> JobRecord:
    return JobRecord(id="job_1", name="wished", created_at=datetime.now(UTC), spec=SPEC, operations=list(operations))


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


def test_an_operation_waits_for_what_was_trained_when_it_was_seen() -> None:
    run = JobRun(JobConfig.parse(SPEC), LedgerState(), num_ordinals=None, writer_epoch=1)
    wishes = Wishes(record())
    assert not wishes.wants_checkpoint
    run.state.last_trained, run.state.checkpoint = 5, checkpoint(3)
    wishes.take(record(operation("a")))
    assert wishes.wants_checkpoint
    assert wishes.settle(run) == []
    run.state.last_trained, run.state.checkpoint = 7, checkpoint(5)
    (done,) = wishes.settle(run)
    assert (done.id, done.state, done.result) == ("a", "succeeded", {"number": 5, "path": "c5"})
    assert wishes.settle(run) == [], "told once, though the record does not say so yet"
    assert not wishes.wants_checkpoint


def test_the_end_of_the_job_ends_what_waits() -> None:
    run = JobRun(JobConfig.parse(SPEC), LedgerState(), num_ordinals=None, writer_epoch=1)
    run.state.last_trained, run.state.checkpoint, run.state.finished = 5, checkpoint(3), "failed"
    (done,) = Wishes(record(operation("a"))).settle(run)
    assert (done.state, done.message) == ("failed", "the job failed before")


def changed(generation: int, patch: dict[str, Any]) -> JobRecord:
    return record().model_copy(update={"generation": generation, "spec": with_patch(SPEC, patch)})


def test_only_the_change_of_a_setting_applies_at_a_step() -> None:
    config = JobConfig.parse(SPEC)
    run = JobRun(config, LedgerState(), num_ordinals=None, writer_epoch=1)
    run.commit([JobStarted(writer_epoch=1, time=0.0, config_digest="c", settings=settings_of(config))])
    wishes = Wishes(changed(2, {"train": {"max_updates": 5}}))
    run.commit(wishes.amend(run, 1.0))
    assert (wishes.followed, wishes.applies_at_step(run.state)) == (2, 1)
    wishes.take(changed(3, {"train": {"max_updates": 5}, "metadata": {"team": "a"}}))
    assert wishes.amend(run, 1.0) == []
    assert (wishes.followed, wishes.applies_at_step(run.state)) == (3, None)
    wishes.take(changed(4, {"train": {"max_updates": 5, "unknown": 1}}))
    assert wishes.amend(run, 1.0) == []
    assert wishes.followed == 3, "what cannot be read is not followed"
