"""A trainer of two ranks: one rank dies, later it hangs; both ranks start again, and no update is lost or repeated.

Two ranks also train a policy that acts in a simulator.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.protocol.events import BatchTrained, Checkpointed, LineageForked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TOTAL = 30
CARTPOLE: dict[str, Any] = {
    "kind": "embodied",
    "name": "cartpole",
    "environment": {"task": "CartPole-v1", "horizon": 50, "num_envs": 4, "sessions": 2, "bytes_per_step": 256},
    "policy": {"type": "categorical", "hidden_sizes": [16]},
    "algorithm": {"type": "ppo", "epochs": 2, "minibatches": 2, "value_hidden_sizes": [16]},
    "backend": {"type": "fsdp"},
    "train": {"batch_size": 8, "max_updates": 6, "max_lag": 1, "draw_timeout_s": 30},
    "evaluation": {"episodes": 0},
    "checkpoint": {"every": 3, "keep": 3},
    "limits": {"byte_budget": 4 << 20},
}


@pytest.mark.long
def test_a_trainer_survives_a_rank_that_dies_and_one_that_hangs(stack_of_ranks: Any) -> None:
    stack = stack_of_ranks
    job = stack.submit(
        f"train.max_updates={TOTAL}", "backend.type=fsdp", "checkpoint.every=3", "train.minibatches=2",
    )  # fmt: skip
    stack.reach(job, 5)
    leader = stack.pid("trainer-0")
    stack.kill("trainer-0-rank1")
    stack.until(lambda: stack.pid("trainer-0") != leader, "rank 0 was started again, too")
    stack.reach(job, 9)
    hung, leader = stack.pid("trainer-0-rank1"), stack.pid("trainer-0")
    with stack.frozen("trainer-0-rank1"):
        stack.until(lambda: stack.pid("trainer-0") != leader, "rank 0 noticed that the other one hangs")
        stack.until(lambda: stack.pid("trainer-0-rank1") not in (0, hung), "it was killed and started again")
    silence_s = float(stack.environment["PENSTOCK_RANK_SILENCE_S"])
    assert f"rank 1 of 2 gave no sign for {silence_s:g} s" in stack.log("trainer-0"), stack.log("trainer-0")[-3000:]
    record = stack.finish(job, 120)

    assert (record.status.phase, record.status.step) == ("succeeded", TOTAL), record.status
    stack.check_audit(job)
    events = stack.ledger(job)
    trained = [event for event in events if isinstance(event, BatchTrained)]
    assert [event.number for event in trained] == list(range(1, TOTAL + 1)), "no gap and no repeat"
    assert not any(isinstance(event, LineageForked) for event in events), "the same ranks give the same bits"
    assert len({event.trainer_epoch for event in trained}) >= 2, "one of three lives may have begun or ended idle"
    assert len({event.digest for event in trained}) > TOTAL / 2, "the updates changed the weights"

    checkpoints = [stack.data_dir / event.path for event in events if isinstance(event, Checkpointed)]
    manifest = msgspec.json.decode((checkpoints[-1] / "manifest.json").read_bytes())
    assert manifest["number"] == TOTAL
    assert manifest["environment"]["ranks"] == "2"
    assert {"shards/__0_0.distcp", "shards/__1_0.distcp", "model.safetensors"} <= manifest["files"].keys()


@pytest.mark.long
def test_two_ranks_train_a_policy_in_a_simulator(stack_of_ranks: Any) -> None:
    """Each rank computes its part of every minibatch. A replay, on one rank, comes near: it adds in another order."""
    stack = stack_of_ranks
    job = stack.client.submit(CARTPOLE).id
    record = stack.finish(job, 120)
    assert (record.status.phase, record.status.step) == ("succeeded", 6), record.status
    assert stack.check_audit(job)["equation"]["trained"] == 48
    events = stack.ledger(job)
    trained = [event for event in events if isinstance(event, BatchTrained)]
    assert len({event.digest for event in trained}) == 6, "every update changed the weights"
    for event in (one for one in events if isinstance(one, Checkpointed)):
        manifest = msgspec.json.decode((stack.data_dir / event.path / "manifest.json").read_bytes())
        assert manifest["environment"]["ranks"] == "2"
    *updates, done = stack.client.replay(job)
    assert done["ok"], done
    assert "ranks: checkpoint '2', here '1'" in done["summary"]
    assert len(updates) == 6
    assert all(row["match"] or row["near"] for row in updates), updates
