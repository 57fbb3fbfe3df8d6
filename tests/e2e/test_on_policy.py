"""The trainer learns from samples of the policy that it updates, and sampler and trainer agree on their log-probs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from penstock.shared.protocol.events import BatchSealed, BatchTrained

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

MISMATCH = 1e-4
"""Largest KL (nats) between sampler and trainer on the same tokens, in float32."""


def trained_batches(stack: Any, job: str) -> dict[int, BatchSealed]:
    """Return the last revision of every batch that was trained, by number."""
    events = stack.ledger(job)
    sealed = {event.number: event for event in events if isinstance(event, BatchSealed)}
    return {event.number: sealed[event.number] for event in events if isinstance(event, BatchTrained)}


def lags(stack: Any, job: str) -> set[int]:
    """Return the lags of all trained tokens: start version of the update minus version of the token."""
    groups, found, tokens = stack.groups(job), set(), 0
    for batch in trained_batches(stack, job).values():
        for sealed in batch.groups:
            group = groups[sealed.seq]
            tokens += sum(int(end - start) for _, _, start, end in group.spans)
            found |= {batch.start_version - int(version) for version in group.spans[:, 1]}
    metrics = stack.client.metrics(job, names="tokens/scored")["series"]["tokens/scored"]
    assert tokens == sum(metrics), "the spans cover every token"
    return found


def check_seconds(series: dict[str, list[float]]) -> None:
    """Check that the seconds of each update are the growth of the totals since the session began."""
    stages = [name.removeprefix("seconds_total/") for name in series if name.startswith("seconds_total/")]
    assert {"forward", "backward", "optimizer", "checkpoint"} & set(stages), stages
    for stage in stages:
        totals, each = series[f"seconds_total/{stage}"], series[f"seconds/{stage}"]
        grown = [after - before for before, after in pairwise([0.0, *totals])]
        assert each == pytest.approx(grown, abs=1e-9), stage


def mismatches(stack: Any, job: str) -> list[float]:
    """Return the KL between sampler and trainer for each update that had something to learn."""
    series = stack.client.metrics(job, names="mismatch/kl")["series"]["mismatch/kl"]
    return [value for value in series if value is not None]


def test_every_token_comes_from_the_version_that_is_updated(stack: Any) -> None:
    total = 25
    job = stack.submit("train.max_lag=0", f"train.max_updates={total}")
    stack.reach(job, 1)
    stack.client.amend(job, {"sampling": {"temperature": 0.6}})
    assert stack.finish(job).status.step == total
    temperatures = [{group.temperature for group in batch.groups} for batch in trained_batches(stack, job).values()]
    assert (temperatures[0], temperatures[-1]) == ({1.0}, {0.6})
    assert lags(stack, job) == {0}
    audit = stack.check_audit(job)
    assert {check["name"]: check["detail"] for check in audit["checks"]}["lag bound"] == "largest lag 0"
    kl = [
        value for value in stack.client.metrics(job, names="mismatch/kl")["series"]["mismatch/kl"] if value is not None
    ]
    assert len(kl) > total / 2, "most batches have something to learn"
    assert max(kl) < MISMATCH, "at either temperature"
    stack.check_replay(job, at_least=total)


@pytest.mark.long
def test_lags_reach_and_keep_to_the_bound(stack: Any) -> None:
    job = stack.submit("train.max_lag=2", "train.max_updates=25")
    assert stack.finish(job).status.step == 25
    assert 0 < max(lags(stack, job)) <= 2
    stack.check_audit(job)
    check_seconds(stack.client.metrics(job)["series"])


LONG = (
    "model.config.max_position_embeddings=512", "sampling.max_new_tokens=480", "sampling.ignore_eos=true",
    "placement.max_running=16", "train.draw_timeout_s=120", "train.max_lag=1", "train.max_updates=6",
)  # fmt: skip
"""Changes that make a completion take longer than an update, so that versions arrive while groups are generated."""


def discarded_tokens(stack: Any) -> float:
    """Return the number of generated tokens that the rollout worker discarded, from its Prometheus metrics."""
    address = stack.stack._health["rollout-0"].replace("/readyz", "/metrics")
    lines = httpx.get(address).raise_for_status().text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("penstock_rollout_discarded_tokens_total ")]
    return float(value)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["keep", "restart", "drain"])
def test_groups_in_progress_at_an_update_follow_its_rule(stack: Any, rule: str) -> None:
    before = discarded_tokens(stack)
    job = stack.submit(*LONG, f"rollout.on_update={rule}", "rollout.drain_s=120")
    assert stack.finish(job, 240).status.step == 6
    discarded = discarded_tokens(stack) - before
    versions = [{int(version) for version in group.spans[:, 1]} for group in stack.groups(job).values()]
    assert len(versions) >= 6 * 4
    assert (max(map(len, versions)) > 1) == (rule == "keep"), "updates met groups in progress"
    assert (discarded > 0) == (rule == "restart")
    assert max(lags(stack, job)) <= 1
    stack.check_audit(job)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_mismatch_shows_weights_that_are_older_than_their_label(stack: Any) -> None:
    """The metric `mismatch/kl` can fail: one of two workers serves old weights under new labels."""
    with stack.attached("stale_rollout", "rollout-stale"):
        job = stack.submit("train.max_lag=0", "train.max_updates=5000", "optimizer.learning_rate=2e-3")
        stack.reach(job, 1)
        stack.until(lambda: max(mismatches(stack, job), default=0.0) > 100 * MISMATCH, "a mismatch that shows", 150)
        stack.client.cancel(job, force=True)
        stack.finish(job)
    workers = {group.worker for batch in trained_batches(stack, job).values() for group in batch.groups}
    assert workers == {"rollout-0", "rollout-stale"}
