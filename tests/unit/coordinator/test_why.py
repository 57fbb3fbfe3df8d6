"""Waits that the leader of a job names: for what, since when, and on whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.leader.evaluation import EvaluationPlan
from penstock.services.coordinator.leader.why import Onsets, explain_waits, recovery_waits
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.retry import Blocked
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import BatchSealed, Checkpointed, LineageForked
from penstock.shared.protocol.messages import Heartbeat

JOB = "job_1"
CONFIG = JobConfig.parse(
    {
        "name": "why",
        "model": {"config": {}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "train": {"batch_size": 16, "max_updates": 9},
    }
)
BASE: dict[str, Any] = {"writer_epoch": 1}
START = Checkpointed(**BASE, time=0.0, number=0, version=0, digest="d", path="p", trainer_epoch=1, low_seq=0)


def sealed(number: int, time: float) -> BatchSealed:
    return BatchSealed(
        **BASE, time=time, number=number, revision=1, start_version=number - 1, update_index=number - 1, groups=[]
    )


class Watched:
    """A job with one worker of each service, whose leader checks it when the test asks."""

    def __init__(self, state: LedgerState) -> None:
        self.run = JobRun(CONFIG, state, num_ordinals=None, writer_epoch=1)
        self.inputs = Inputs(0.0)
        self.plan, self.onsets, self.members = EvaluationPlan(CONFIG.evaluation, ()), Onsets(), Members()
        for service, worker in (("trainer", "trainer-7"), ("rollout", "rollout-0"), ("reward", "reward-0")):
            beat = Heartbeat(
                service=service, worker=worker, host="h", pid=1, started=0.0, interval_s=60.0, health_port=0,
                ready=True, jobs={JOB: {}},
            )  # fmt: skip
            self.members.on_heartbeat(beat, 0.0)

    def at(self, now: float, blocked: Blocked | None = None) -> dict[str, dict[str, Any]]:
        """Check the job at ``now``; return the rows of its waits by id."""
        inputs = replace(self.inputs, now=now)
        self.onsets.look(JOB, self.run, inputs, self.plan)
        rows = explain_waits(
            JOB, self.run, inputs, self.plan, self.members, clock=1.0, onsets=self.onsets, blocked=blocked
        )
        return {row["id"]: row for row in rows}


def test_each_sealed_batch_has_its_own_age_whoever_leads() -> None:
    rows = Watched(LedgerState(checkpoint=START, sealed={1: sealed(1, 100.0), 2: sealed(2, 130.0)})).at(150.0)
    assert [(rows[id]["age_s"], rows[id]["holder"]) for id in ("1.1", "2.1")] == [
        (50.0, "trainer-7"),
        (20.0, "trainer-7"),
    ]


def test_the_problem_of_a_worker_comes_before_what_it_waits_for() -> None:
    job = Watched(LedgerState(checkpoint=START))
    row = {"problem": "no room", "problem_since": 20.0, "waiting_for": "the model", "since": 30.0, "subject": "t"}
    beat = Heartbeat(
        service="rollout", worker="rollout-7", host="h", pid=1, started=0.0, interval_s=60.0, health_port=0, ready=True,
        jobs={JOB: row},
    )  # fmt: skip
    job.members.on_heartbeat(beat, 0.0)
    waits = explain_waits(JOB, job.run, Inputs(50.0), job.plan, job.members, clock=1.0, onsets=job.onsets)
    assert [(one["waiting_for"], one["age_s"]) for one in waits if one["holder"] == "rollout-7"][:2] == [
        ("rollout worker 'rollout-7' to work: no room", 30.0), ("the model", 20.0),
    ]  # fmt: skip


def test_a_fork_is_explained_until_an_update_follows() -> None:
    fork = LineageForked(
        **BASE, time=1.0, from_batch=1, version=3, digest="w", reason="erased: all of it", trainer_epoch=1,
        min_version=3, deadline=9.0,
    )  # fmt: skip
    state = LedgerState(checkpoint=START)
    state.apply(fork)
    row = Watched(state).at(10.0)["version 3"]
    assert row["waiting_for"] == "the first update since training went back: erased: all of it"
    state.version = 4
    assert "version 3" not in Watched(state).at(10.0)


def test_a_wait_without_a_time_begins_when_the_leader_first_sees_it() -> None:
    job = Watched(LedgerState())
    assert job.at(10.0)["batch 0"]["age_s"] == 0.0
    assert job.at(14.0)["batch 0"] | {"waiting_for": ""} == {
        "waiting_for": "", "subject": subjects.report(JOB), "id": "batch 0", "holder": "trainer-7", "age_s": 4.0,
    }  # fmt: skip
    job.run.state.checkpoint = START
    job.inputs = Inputs(0.0, desired="paused")
    assert list(job.at(20.0)) == [JOB]
    assert job.at(23.0)[JOB]["age_s"] == 3.0
    job.inputs = Inputs(0.0)
    job.at(24.0)
    job.inputs = Inputs(0.0, desired="paused")
    assert job.at(30.0)[JOB]["age_s"] == 0.0, "another pause"


def test_waits_for_room_and_for_a_best_checkpoint_have_separate_ages() -> None:
    job = Watched(LedgerState(checkpoint=START))
    job.inputs = Inputs(0.0, new_best="best of eval/greedy")
    job.at(5.0)
    job.run.stored_bytes = CONFIG.limits.byte_budget
    job.at(8.0)
    rows = job.at(9.0)
    assert (rows[JOB]["age_s"], rows["checkpoint 0"]["age_s"]) == (4.0, 1.0)
    assert {rows[id]["holder"] for id in (JOB, "checkpoint 0")} == {"trainer-7"}


def test_a_blocked_write_of_the_leader_comes_first() -> None:
    blocked = Blocked("an entry of the ledger", subjects.ledger(JOB), 100.0, "stream LEDGER is full")
    first = next(iter(Watched(LedgerState(checkpoint=START)).at(107.5, blocked).values()))
    assert first == {
        "waiting_for": "the bus, for an entry of the ledger (stream LEDGER is full)",
        "subject": subjects.ledger(JOB), "id": JOB, "holder": None, "age_s": 7.5,
    }  # fmt: skip
    assert [row["age_s"] for row in recovery_waits(JOB, blocked, 107.5, 90.0)] == [7.5, 17.5]
