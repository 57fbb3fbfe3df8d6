"""A trainer is killed at random steps and starts again with another number of ranks: 2, then 1, then 3.

Another number of ranks adds up gradients in another order, so a new trainer cannot repeat the updates after the last
checkpoint bit for bit: they are rolled back, and their prompts are drawn again. The final lineage is one run over the
data. Its weights are those of a single process that trains the same batches without a break, within the bound of a
replay.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from penstock.local.child import ServiceRanks
from penstock.services.trainer.learners.replay_tolerance import BOUNDS
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Checkpointed, Event, LineageForked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TOTAL, EVERY = 20, 3
"""Updates of the job, and updates between two checkpoints."""
GROUPS = 4
"""Groups in a batch."""


@contextmanager
def trainer(stack: Any, size: int, **of_the_last: str) -> Iterator[ServiceRanks]:
    """Run a trainer of ``size`` ranks, the last one with more variables; kill all ranks at once after the block."""
    workers = [f"trainer-of-{size}", *(f"trainer-of-{size}-rank{rank}" for rank in range(1, size))]
    environments = [stack.environment_of(worker) for worker in workers]
    environments[-1] |= of_the_last
    log_dir = stack.directory / "data" / "logs"
    ranks = ServiceRanks("trainer", workers, environments=environments, log_dir=log_dir, launch=stack.launch)
    ranks.start()
    try:
        yield ranks
    finally:
        for pid in ranks.processes.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ranks.stop(deadline_s=5)


def lineage(events: list[Event]) -> tuple[dict[int, BatchSealed], list[BatchTrained], list[Checkpointed]]:
    """Return the final lineage: sealed batches by number, and trained batches and checkpoints in order."""
    sealed: dict[int, BatchSealed] = {}
    trained: list[BatchTrained] = []
    checkpoints: list[Checkpointed] = []
    for event in events:
        match event:
            case BatchSealed():
                sealed[event.number] = event
            case BatchTrained():
                trained.append(event)
            case Checkpointed():
                checkpoints.append(event)
            case LineageForked():
                trained = [one for one in trained if one.number < event.from_batch]
                checkpoints = [one for one in checkpoints if one.number < event.from_batch]
    return sealed, trained, checkpoints


def has_checkpoint_of(stack: Any, job: str, size: int) -> bool:
    """Return True once the lineage has a checkpoint of ``size`` ranks; the trainer writes it during later updates."""
    return any(ranks_of(stack, checkpoint) == str(size) for checkpoint in lineage(stack.ledger(job))[2])


def ranks_of(stack: Any, checkpoint: Checkpointed) -> str:
    """Return the number of ranks that wrote a checkpoint."""
    manifest = msgspec.json.decode((stack.data_dir / checkpoint.path / "manifest.json").read_bytes())
    return str(manifest["environment"]["ranks"])


@pytest.mark.long
def test_a_trainer_continues_with_another_number_of_ranks(stack_without_trainer: Any) -> None:
    stack = stack_without_trainer
    seed = int(os.environ.get("PENSTOCK_TEST_SEED") or random.SystemRandom().randrange(1000))
    chance = random.Random(seed)
    kills = [chance.randint(3, 7), chance.randint(9, 12)]
    print(f"PENSTOCK_TEST_SEED={seed}: killed after updates {kills}")
    job = stack.submit(
        f"train.max_updates={TOTAL}", f"checkpoint.every={EVERY}", "checkpoint.keep=20", "train.max_lag=0",
        "train.minibatches=2", "train.staleness=in_order", "backend.type=fsdp", "optimizer.learning_rate=1e-3",
        reward={"scorers": [{"type": "function", "path": "e2e_scorers:paced"}], "processes": 1},
    )  # fmt: skip
    for size, step in zip((2, 1), kills, strict=True):
        with trainer(stack, size):
            stack.reach(job, step, 120)
            stack.until(lambda size=size: has_checkpoint_of(stack, job, size), f"a checkpoint of {size} ranks", 60)
            assert stack.status(job).step < TOTAL, "the job ended before the trainer was killed"
    with trainer(stack, 3):
        record = stack.finish(job, 120)
        rows = list(stack.client.replay(job))
    assert (record.status.phase, record.status.step) == ("succeeded", TOTAL), record.status
    stack.check_audit(job)

    events = stack.ledger(job)
    sealed, trained, checkpoints = lineage(events)
    order = [group.draw.ordinal for batch in trained for group in sealed[batch.number].groups]
    assert order == list(range(TOTAL * GROUPS)), "the data order has a gap or a repeat"
    assert [sealed[batch.number].update_index for batch in trained] == list(range(TOTAL)), "one schedule"
    assert len({event.trainer_epoch for event in events if isinstance(event, BatchTrained)}) == 3
    forks = [event for event in events if isinstance(event, LineageForked)]
    assert all("another weight digest" in fork.reason for fork in forks), forks
    assert {ranks_of(stack, checkpoint) for checkpoint in checkpoints} == {"1", "2", "3"}

    *updates, done = rows
    assert done["ok"], done
    print(f"{len(forks)} forks; replay on one rank: {done['summary']}")
    assert len(updates) == TOTAL
    assert all(row["match"] or row["near"] for row in updates)
    assert any(row["near"] for row in updates), "three numbers of ranks gave the bits of one"
    assert f"within the bound of {BOUNDS['float32']:g}" in done["summary"]


@pytest.mark.long
def test_an_error_of_one_rank_fails_the_job(stack_without_trainer: Any) -> None:
    """Rank 1 lacks a module that rank 0 has, while rank 0 waits for rank 1 in a collective of the warm start."""
    stack = stack_without_trainer
    job = stack.submit(
        "data.curriculum=e2e_scorers:as_they_come", "warm_start.steps=2", "backend.type=fsdp", "train.max_updates=2"
    )
    with trainer(stack, 2, PYTHONPATH="") as ranks:
        record = stack.finish(job, 120)
        stack.until(lambda: not ranks.running, "the ranks end, for there is no way out of the collective", 60)
    assert record.status.phase == "failed"
    message = "rank 1: the warm start: data.curriculum: 'e2e_scorers:as_they_come' cannot be imported"
    assert message in record.status.message
