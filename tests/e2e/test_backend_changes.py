"""A job moves between backends while it trains (docs/backends.md), and trains every batch exactly once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Checkpointed, LineageForked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

GROUPS = 4
"""Groups in a batch."""
PACED = {"scorers": [{"type": "function", "path": "e2e_scorers:paced"}], "processes": 1}
MOVES: list[dict[str, Any]] = [
    {"type": "fsdp", "activation_checkpointing": True},
    {"type": "megatron", "tensor_parallel": 2, "sequence_parallel": True},
    {"type": "local"},
]
TOO_LARGE = {"type": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}
"""Backend that needs four ranks."""
CUT = ("tensor_parallel", "ranks")
"""Keys in the manifest of a checkpoint by which the backends of ``MOVES`` differ."""


def submitted(stack: Any) -> str:
    """Submit a job that runs until a test ends it; return its id."""
    return str(
        stack.submit(
            "train.max_updates=100000", "checkpoint.every=100000", "checkpoint.keep=20", "train.max_lag=0",
            "train.staleness=in_order", "optimizer.learning_rate=1e-3", reward=PACED,
        )
    )  # fmt: skip


def pins(stack: Any, checkpoint: Checkpointed) -> tuple[str | None, ...]:
    manifest = msgspec.json.decode((stack.data_dir / checkpoint.path / "manifest.json").read_bytes())
    return tuple(manifest["environment"].get(key) for key in CUT)


def moved(stack: Any, job: str, reason: str, above: int) -> Checkpointed | None:
    """Return the first checkpoint at update ``above`` or later that was taken for ``reason``, or None."""
    found = [event for event in stack.ledger(job) if isinstance(event, Checkpointed) and event.reason == reason]
    return next((event for event in found if event.number >= above), None)


def test_a_job_moves_from_backend_to_backend(stack_of_ranks: Any) -> None:
    stack = stack_of_ranks
    job = submitted(stack)
    step, taken = 0, []
    for backend in MOVES:
        step = stack.reach(job, step + 2, 120)
        stack.client.amend(job, {"backend": backend})
        reason = f"to go on with backend '{backend['type']}'"
        taken.append(stack.until(lambda reason=reason, step=step: moved(stack, job, reason, step), reason, 60))
    step = stack.reach(job, step + 2, 120)

    with pytest.raises(ConfigError, match="does not divide"):
        stack.client.amend(job, {"backend": {"type": "megatron", "tensor_parallel": 3}})
    stack.client.amend(job, {"backend": TOO_LARGE})
    stack.until(lambda: stack.status(job).phase == "paused", "the pause of a job that two ranks cannot hold")
    assert "4" in stack.status(job).message, stack.status(job)
    stack.client.amend(job, {"backend": {"type": "fsdp"}})
    stack.client.resume(job)
    total = stack.reach(job, stack.status(job).step + 2, 120) + 5
    stack.client.amend(job, {"train": {"max_updates": total}})
    record = stack.finish(job, 120)
    assert (record.status.phase, record.status.step) == ("succeeded", total), record.status
    stack.check_audit(job)

    events = stack.ledger(job)
    assert not any(isinstance(event, LineageForked) for event in events)
    trained = [event.number for event in events if isinstance(event, BatchTrained)]
    assert trained == list(range(1, total + 1))
    sealed = {event.number: event for event in events if isinstance(event, BatchSealed)}
    order = [group.draw.ordinal for number in trained for group in sealed[number].groups]
    assert order == list(range(total * GROUPS)), "the data order has a gap or a repeat"
    assert [pins(stack, checkpoint) for checkpoint in taken] == [(None, None), (None, "2"), ("2", "2")]

    *updates, done = stack.client.replay(job)
    assert done["ok"], done
    assert len(updates) == total
    assert all(row["match"] or row["near"] for row in updates), "moments were lost on the way"


def test_a_reverted_move_and_the_cancel_of_a_job_that_no_backend_can_hold(stack_of_ranks: Any) -> None:
    stack = stack_of_ranks
    job = submitted(stack)
    step = stack.reach(job, 2, 120)
    for backend in ("fsdp", "local"):  # both within one update, or nearly
        stack.client.amend(job, {"backend": {"type": backend}}, wait_s=0)
    stack.reach(job, step + 4, 120)
    stack.client.checkpoint_now(job)
    newest = [event for event in stack.ledger(job) if isinstance(event, Checkpointed)][-1]
    assert pins(stack, newest) == (None, None), "the job file says local"

    stack.client.amend(job, {"backend": TOO_LARGE})
    stack.until(lambda: stack.status(job).phase == "paused", "the pause of a job that two ranks cannot hold")
    stack.client.resume(job)
    stack.until(lambda: stack.status(job).phase == "running", "another attempt")
    stack.until(lambda: stack.status(job).phase == "paused", "the next pause, for nothing has changed")
    stack.client.cancel(job)
    assert stack.finish(job).status.phase == "cancelled"
    stack.check_audit(job)
