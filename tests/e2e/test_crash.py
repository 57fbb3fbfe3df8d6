"""Any process may die or stall at any moment of a job: nothing is lost or trained twice, and no person has to help."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.shared.protocol.events import BatchSealed, BatchTrained, Checkpointed, Event

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]

VICTIMS = ("coordinator-0", "rollout-0", "reward-0", "env-0", "trainer-0", "nats", "valkey")
STALL_S = 2.0
"""Longer than the leases of the coordinator and the trainer."""
STALL_OF_ROLLOUT_S = 5.5
"""Longer than the lease of a ticket."""
WARMER = 1.5
EVERY = 7
"""Updates between checkpoints."""
FURTHER = 15
"""Updates after the last fault; the status may be half a second old."""

PACED = {"scorers": [{"type": "function", "path": "e2e_scorers:paced"}], "processes": 1}


def check_end(stack: Any, job: str, total: int, *, trainers: int) -> None:
    """Check that the job ended, that each update counts once, and that groups have both requested temperatures."""
    stack.check_updates(job, total, trainers=trainers)
    events = stack.ledger(job)
    digests = {event.digest for event in events if isinstance(event, BatchTrained)}
    assert len(digests) > total / 2, "the updates changed the weights"
    sealed = [group for event in events if isinstance(event, BatchSealed) for group in event.groups]
    assert {group.temperature for group in sealed} == {1.0, WARMER}
    stack.check_replay(job, at_least=1)
    stack.until(lambda: not list(stack.shm.glob(f"*{job}*")), "no weights of a finished job in shared memory", 10)


def repeated(events: list[Event]) -> list[int]:
    """For each restart of the trainer, return how many batches it trained again: those after the newest checkpoint."""
    found, epoch, trained, saved = [], 0, 0, 0
    for event in events:
        if not isinstance(event, BatchTrained | Checkpointed):
            continue
        if event.trainer_epoch > epoch > 0:
            found.append(trained - saved)
        epoch = event.trainer_epoch
        if isinstance(event, BatchTrained):
            trained = event.number
        else:
            saved = event.number
    return found


def between_checkpoints(stack: Any, job: str) -> None:
    """Wait until a new trainer would have batches to train again."""
    stack.until(lambda: 2 <= stack.updates_to_repeat(job) <= EVERY - 3, "updates after a checkpoint")


def end(stack: Any, job: str) -> int:
    """Let a long job end after a few more updates, whose prompts are sampled at another temperature.

    Return the number of updates that the job will have made.
    """
    total = int(stack.status(job).step) + FURTHER
    stack.client.amend(job, {"train": {"max_updates": total}, "sampling": {"temperature": WARMER}})
    return total


def test_every_process_is_killed(stack: Any) -> None:
    job = stack.submit("train.max_updates=100000", f"checkpoint.every={EVERY}", reward=PACED)
    for victim in VICTIMS:
        stack.reach(job, stack.status(job).step + 3)
        if victim == "trainer-0":
            between_checkpoints(stack, job)
        stack.kill(victim)
    stack.reach(job, stack.status(job).step + 3)
    between_checkpoints(stack, job)
    stack.kill(*VICTIMS)
    stack.reach(job, stack.status(job).step + 3)
    check_end(stack, job, end(stack, job), trainers=3)
    again = repeated(stack.ledger(job))
    assert len(again) >= 2
    assert sum(count >= 1 for count in again) >= 2, f"too few repeated batches to show equal bits: {again}"


def test_every_process_stalls(stack: Any) -> None:
    job = stack.submit("train.max_updates=100000", reward=PACED)
    for victim in VICTIMS:
        stack.reach(job, stack.status(job).step + 3)
        with stack.frozen(victim):
            time.sleep(STALL_OF_ROLLOUT_S if victim == "rollout-0" else STALL_S)
    stack.reach(job, stack.status(job).step + 3)
    check_end(stack, job, end(stack, job), trainers=2)
