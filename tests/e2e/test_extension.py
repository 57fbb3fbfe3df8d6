"""A job that has ended is extended: it trains the same prompts as a job that was longer from the start, and replays.

Weights of the two jobs are not compared: their answers differ where an engine rounds otherwise beside other work.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.shared.errors import Conflict
from penstock.shared.protocol.events import BatchSealed, Extended, Finished

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ON_POLICY = ["train.max_lag=0", "checkpoint.every=2", "seed=11"]


def updates(stack: Any, job: str) -> list[tuple[int, int, list[int]]]:
    """Return start version, index and prompts of each update.

    Samples are left out, because their rounding depends on the other work of an engine.
    """
    return [
        (batch.start_version, batch.update_index, sorted(group.draw.ordinal for group in batch.groups))
        for batch in stack.ledger(job)
        if isinstance(batch, BatchSealed)
    ]


@pytest.mark.long
def test_an_extended_job_trains_the_prompts_of_a_longer_one_and_replays(stack: Any) -> None:
    whole, job = (stack.submit("name=long", f"train.max_updates={updates}", *ON_POLICY) for updates in (5, 3))
    assert stack.finish(whole).status.phase == stack.finish(job).status.phase == "succeeded"
    with pytest.raises(Conflict, match="max_updates must be more"):
        stack.client.extend(job, 3)
    result = stack.cli("extend", job, "--max-updates", "5", "--follow", "--json")
    assert result.exit_code == 0, result.output
    record = stack.client.get(job)
    assert (record.status.phase, record.status.step, record.status.total_steps) == ("succeeded", 5, 5)
    assert (record.extensions, record.spec["train"]["max_updates"]) == (1, 5)
    assert updates(stack, job) == updates(stack, whole)
    ends = [type(event) for event in stack.ledger(job) if isinstance(event, Finished | Extended)]
    assert ends == [Finished, Extended, Finished]
    stack.check_audit(job)
    stack.check_replay(job, 5)  # in one run from the start: the extension kept the state of the optimizer
    assert stack.client.checkpoints(job)[-1]["final"] is True
    phases = [row["message"] for row in stack.client.events(job) if row["type"] in ("phase", "extended")]
    assert phases.count("succeeded") == 2, "the events show both ends"


@pytest.mark.long
def test_a_refused_extension_names_its_reason(stack: Any) -> None:
    job = stack.submit(
        "name=stops", "train.max_updates=4", "optimizer.schedule=cosine",
        early_stop={"metric": "reward/mean", "window": 1, "goal": 0.0},
    )  # fmt: skip
    record = stack.finish(job)
    assert record.status.step < 4
    with pytest.raises(Conflict, match=r"would end at once: .*job:stops@latest"):
        stack.client.extend(job, 9)
    copied = stack.cli("clone", job, "--name", "copied", "--set", "early_stop=null", "--set", "train.max_updates=2")
    assert copied.exit_code == 0, copied.output
    copy = stack.client.find("copied")
    assert (copy.spec["early_stop"], copy.spec["optimizer"]) == (None, record.spec["optimizer"])
    with pytest.raises(Conflict, match=r"amend train\.max_updates"):
        stack.client.extend(copy.id, 3)
    assert stack.finish(copy.id).status.step == 2
    extended = stack.client.extend(copy.id, 3)
    assert "'cosine' had decayed over the run" in extended["notes"][0]
    assert stack.finish(copy.id).status.step == 3
    rates = stack.client.metrics(copy.id, names="optimizer/lr")["series"]["optimizer/lr"]
    peak, cosine = record.spec["optimizer"]["learning_rate"], [1.0, 0.5, (1 + math.cos(math.pi * 2 / 3)) / 2]
    assert rates == pytest.approx([peak * share for share in cosine]), "from two updates, stretched to three"
