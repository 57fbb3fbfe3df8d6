"""A replay in another environment than that of the training gives other bits, within the bounds that it states."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import pytest

from penstock.local import read_state
from penstock.services.trainer.learners.replay_tolerance import BOUNDS
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.messages import ReplayRow
from penstock.shared.transport.bus import Bus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]


def test_a_replay_by_other_cpu_instructions_gives_near_weights(stack: Any) -> None:
    """torch uses no vector instructions in the replay, as on an older CPU."""
    job = stack.submit(
        "train.max_updates=24", "checkpoint.every=8", "checkpoint.keep=4", "optimizer.learning_rate=1e-3"
    )
    assert stack.finish(job).status.step == 24

    state = read_state(stack.directory / "data")
    assert state is not None

    async def replay(bus: Bus) -> tuple[list[ReplayRow], int]:
        rows: list[ReplayRow] = []
        listening = await bus.subscribe(
            subjects.replay_progress("elsewhere"), lambda _, data: rows.append(unpack(data, ReplayRow)[0])
        )
        env = {
            **os.environ, **stack.environment, "PENSTOCK_NATS_URL": state.nats_url,
            "PENSTOCK_DATA_DIR": state.data_dir, "ATEN_CPU_CAPABILITY": "default",
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.services.trainer.replay", job, "elsewhere", "1", env=env
        )
        code = await process.wait()
        await listening.close()
        return rows, code

    rows, code = stack.on_bus(replay)
    *updates, done = rows
    assert (code, done.ok) == (0, True), done.summary
    assert len(updates) == 24
    different = [row for row in updates if not row.match]
    assert different, "without vector instructions sums come out otherwise"
    assert all(row.near for row in different)
    assert "another environment (cpu_capability: checkpoint" in done.summary
    assert f"within the bound of {BOUNDS['float32']:g}" in done.summary
    assert "weights of checkpoint 24" in done.summary
