"""Rollout workers come and go while a job runs: they share its tickets, and others take over those of a dead worker."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import BatchSealed, Dropped
from penstock.shared.protocol.frame import decode_frame

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

SECOND = "rollout-attached"
JOINED_S = 12.0
"""Longest time from the start of a worker until a batch has a group of it: 3 s on an idle machine, four times as long
on one that runs other tests."""


def rows_of(stack: Any, job: str) -> list[dict[str, Any]]:
    """Return the rows of the two rollout workers."""
    return [row for row in stack.client.workers(job) if row["worker"] in ("rollout-0", SECOND)]


@pytest.mark.long
def test_two_workers_share_a_job_and_one_may_die(stack: Any) -> None:
    total = 80
    with stack.attached("penstock.services.rollout", SECOND) as second:
        job = stack.submit(f"train.max_updates={total}")

        def groups_of(worker: str) -> int:
            rows = {row["worker"]: row for row in stack.client.workers(job)}
            return int(rows.get(worker, {}).get("groups", 0))

        stack.until(lambda: groups_of(SECOND) and groups_of("rollout-0"), "both workers answered tickets", 30)
        stack.until(lambda: all("chosen_transport" in row for row in rows_of(stack, job)), "transports are chosen", 30)
        for row in rows_of(stack, job):
            assert (row["chosen_transport"], row["transport"], row["fetched_bytes"]) == ("shm", "shm", 0)
            assert row["stage_s"] > 0
        second.kill()
        second.wait(5)
        assert stack.status(job).step < total - 5
    record = stack.finish(job)
    assert (record.status.phase, record.status.step) == ("succeeded", total)
    assert record.status.draws["dropped"] == {}, "tickets of the dead worker are answered by the other"
    stack.check_audit(job)
    batches = [event for event in stack.ledger(job) if isinstance(event, BatchSealed)]
    workers = [{group.worker for group in batch.groups} for batch in batches]
    assert set.union(*workers) == {"rollout-0", SECOND}
    assert workers[-1] == {"rollout-0"}


@pytest.mark.long
def test_workers_are_started_and_drained_on_request(stack: Any) -> None:
    """A drained worker is not started again and not lost; one that is killed at that time is."""
    job = stack.submit("train.max_updates=100000")

    def listed() -> dict[str, bool]:
        return {row["worker"]: row["alive"] for row in stack.client.workers(job)}

    def lost() -> list[str]:
        rows = stack.client.events(job, follow=False)
        return [row["data"]["worker"] for row in rows if row["type"] == "worker_lost"]

    result = stack.client.scale(job, "rollout", 2)
    assert result == {"replicas": 2, "ready": 2, "leaving": 0}
    assert "rollout-1" in stack.stack.processes
    stack.until(lambda: listed().get("rollout-1"), "the new worker works")
    with stack.attached("penstock.services.rollout", SECOND) as second:
        stack.until(lambda: listed().get(SECOND), "the worker started by hand works")
        before = lost().count("rollout-1")  # a slow machine may have missed heartbeats of a worker that works
        scaled = stack.cli("scale", job, "rollout=1")
        assert scaled.exit_code == 0, scaled.output
        assert "rollout-1" not in stack.stack.processes
        assert not any("rollout-1" in text for text in stack.messages), "a drained worker is not started again"
        stack.until(lambda: "rollout-1" not in listed(), "the drained worker is listed no more", 60, listed)
        second.kill()
        second.wait(5)
        stack.until(lambda: SECOND in lost(), "the report of the killed worker", 60, listed)
    assert lost().count("rollout-1") == before, "the leader looked at all workers when it missed the killed one"
    assert (listed()[SECOND], "rollout-1" in listed()) == (False, False)
    total = int(stack.status(job).step) + 10
    stack.client.amend(job, {"train": {"max_updates": total}})
    record = stack.finish(job)
    assert (record.status.phase, record.status.step) == ("succeeded", total)
    stack.check_audit(job)
    kinds = [one.kind for one in record.operations if one.state == "succeeded"]
    assert kinds == ["scale"] * 2


@pytest.mark.long
def test_a_worker_that_joins_and_leaves_costs_seconds_and_no_group(stack: Any) -> None:
    """The worker loads the model after it is ready. Groups that it had begun at SIGTERM are trained as its own."""
    job = stack.submit("train.max_updates=120")
    stack.until(lambda: stack.status(job).step >= 3, "three updates", 90)

    def sealed() -> dict[str, float]:
        """Return the draws of the second worker's groups, with the times of their batches."""
        batches = [event for event in stack.ledger(job) if isinstance(event, BatchSealed)]
        return {str(group.draw): batch.time for batch in batches for group in batch.groups if group.worker == SECOND}

    def held() -> set[str]:
        rows = {row["worker"]: row for row in stack.client.workers(job)}
        return set(rows.get(SECOND, {}).get("holds", []))

    with stack.attached("penstock.services.rollout", SECOND) as second:
        ready = time.time()
        first = stack.until(lambda: min(sealed().values(), default=None), "a group of the second worker in a batch")
        assert first - ready < JOINED_S
        begun = stack.until(held, "tickets in its hands")
        second.terminate()
        assert second.wait(60) == 0, stack.log(SECOND)[-2000:]
    assert stack.status(job).step < 115, "it left while the job was running"
    assert stack.finish(job).status.step == 120
    stack.check_audit(job)
    assert not [event for event in stack.ledger(job) if isinstance(event, Dropped)]
    assert begun <= sealed().keys()


LONG = (
    "model.config.max_position_embeddings=2048", "sampling.max_new_tokens=1500", "sampling.ignore_eos=true",
    "rollout.checkpoint_s=0.1", "placement.max_running=8", "limits.byte_budget=33554432", "train.draw_timeout_s=300",
    "train.max_lag=4", "train.max_updates=2",
)  # fmt: skip
"""Changes that make completions take seconds, so that a worker is stopped in the middle of them."""


def saved(stack: Any, job: str, draw: str) -> dict[int, list[int]]:
    """Return the saved tokens of the unfinished completions of a draw, by index of the completion."""
    subject = subjects.partial(job, f"train:{draw}", 0).rpartition(".")[0] + ".*"
    messages = stack.on_bus(lambda bus: bus.read(subjects.PARTIAL, subject))
    return {int(one.subject.rpartition(".")[2]): decode_frame(one.data)["token_ids"].tolist() for one in messages}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_another_worker_goes_on_with_the_tokens_of_one_that_stops(
    stack: Any, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setenv("PENSTOCK_DRAIN_S", "2")  # of the second worker, which lets groups end for half a second

    def row(worker: str) -> dict[str, Any]:
        return next((row for row in stack.client.workers(job) if row["worker"] == worker), {})

    def in_progress() -> dict[str, dict[int, list[int]]]:
        """Return the second worker's draws whose completions are all saved, but far from complete, with the tokens."""
        found = {draw: saved(stack, job, draw) for draw in row(SECOND).get("holds", [])}
        return {draw: begun for draw, begun in found.items() if len(begun) == 4 and max(map(len, begun.values())) < 400}

    with stack.attached("penstock.services.rollout", SECOND) as second:
        job = stack.submit(*LONG)
        begun = stack.until(in_progress, "completions in progress of the second worker", 90)
        os.kill(second.pid, how)
        assert second.wait(20) == (0 if how == signal.SIGTERM else -how), stack.log(SECOND)[-2000:]
    status = stack.finish(job, 240).status
    assert (status.step, status.draws["dropped"]) == (2, {})
    stack.check_audit(job)
    groups = {str(group.draw): group for group in stack.groups(job).values()}
    moved = [draw for draw in begun if groups[draw].meta["worker"] == "rollout-0"]
    assert moved, "the second worker ended all its groups"
    for draw in moved:
        group = groups[draw]
        assert group.lengths.tolist() == [1500] * 4
        for index, tokens in begun[draw].items():
            start = int(group.cu_seqlens[index])
            assert group.token_ids[start : start + len(tokens)].tolist() == tokens
    assert f"train:{moved[0]} goes on with" in stack.log("rollout-0")
    assert row("rollout-0").get("continued_tokens", 1) > 0
