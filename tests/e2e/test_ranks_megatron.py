"""A trainer of two tensor-parallel ranks survives the death of one rank and trains its job to the end, bit for bit.

A replay has only one rank: its weights are near, but have other bits.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

import pytest

from penstock.local import read_state
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import BatchTrained, LineageForked
from penstock.shared.protocol.messages import ReplayRow
from penstock.shared.transport.bus import Bus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

TOTAL = 6


def test_a_tensor_parallel_trainer_survives_a_killed_rank(stack_of_ranks: Any, nursery: Any) -> None:
    stack = stack_of_ranks
    job = stack.submit(
        f"train.max_updates={TOTAL}", "backend.type=megatron", "backend.tensor_parallel=2", "checkpoint.every=2",
        "backend.sequence_parallel=true",
    )  # fmt: skip
    stack.reach(job, 3)
    leader = stack.pid("trainer-0")
    stack.kill("trainer-0-rank1")
    stack.until(lambda: stack.pid("trainer-0") != leader, "rank 0 was started again, too")
    record = stack.finish(job, 150)

    assert (record.status.phase, record.status.step) == ("succeeded", TOTAL), record.status
    stack.check_audit(job)
    events = stack.ledger(job)
    trained = [event.number for event in events if isinstance(event, BatchTrained)]
    assert trained == list(range(1, TOTAL + 1)), "no gap and no repeat"
    assert not any(isinstance(event, LineageForked) for event in events), "the same ranks give the same bits"

    *updates, done = stack.on_bus(functools.partial(replay, nursery, stack, job))
    assert done.ok, done.summary
    assert len(updates) == TOTAL
    assert "another environment (" in done.summary
    assert "tensor_parallel: checkpoint '2', here '1'" in done.summary


async def replay(nursery: Any, stack: Any, job: str, bus: Bus) -> list[ReplayRow]:
    """Replay the job on this host, in a process of its own; return the rows that it publishes."""
    state, rows = read_state(stack.directory / "data"), list[ReplayRow]()
    assert state is not None
    listening = await bus.subscribe(
        subjects.replay_progress("one_rank"), lambda _, data: rows.append(unpack(data, ReplayRow)[0])
    )
    environment = {
        **os.environ, **stack.environment, "PENSTOCK_NATS_URL": state.nats_url, "PENSTOCK_DATA_DIR": state.data_dir,
    }  # fmt: skip
    process = nursery.run("penstock.services.trainer.replay", job, "one_rank", "1", environment=environment)
    await asyncio.to_thread(process.wait)
    await listening.close()
    return rows
