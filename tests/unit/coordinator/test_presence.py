"""A lost worker is reported once; a worker that drained is not lost."""

from __future__ import annotations

from typing import Any

from penstock.services.coordinator.jobs.members import (
    HISTORY_S,
    MOST_SPANS,
    PROBLEM_S,
    Members,
    PresenceWatch,
    ProblemWatch,
)
from penstock.shared.protocol.messages import Heartbeat

SERVICES = ("rollout", "trainer")


class Workers:
    """Members whose clock the test sets."""

    def __init__(self) -> None:
        self.members, self.watch, self.clock = Members(), PresenceWatch(), 0.0

    def beat(self, worker: str, *, service: str = "rollout", ready: bool = True, **jobs: dict[str, Any]) -> None:
        beat = Heartbeat(
            service=service, worker=worker, host="h", pid=1, started=0.0, interval_s=1.0, health_port=0, ready=ready,
            jobs=jobs,
        )  # fmt: skip
        self.members.on_heartbeat(beat, self.clock)

    def changes(self, after_s: float = 0.0) -> list[tuple[Any, ...]]:
        self.clock += after_s
        found = self.watch.changes(self.members, SERVICES, self.clock)
        return [(one.type, one.worker, one.level) for one in found]


def test_a_worker_that_drained_is_listed_no_more_once_it_has_ended() -> None:
    workers = Workers()
    workers.beat("rollout-0")
    workers.beat("rollout-1", ready=False)
    assert [row["worker"] for row in workers.members.rows("job", 0.0)] == ["rollout-0", "rollout-1"]
    (lost,) = workers.members.rows("job", 60.0)
    assert (lost["worker"], lost["alive"]) == ("rollout-0", False)


def test_a_loss_and_a_return_are_reported_once() -> None:
    workers = Workers()
    workers.beat("rollout-0")
    workers.beat("reward-0", service="reward")
    assert workers.changes() == []
    assert workers.changes(3.0) == []
    assert workers.changes(2.0) == [("worker_lost", "rollout-0", "warning")], "other services are not reported"
    assert workers.changes(5.0) == []
    workers.beat("rollout-0")
    assert workers.changes() == [("worker_back", "rollout-0", "info")]
    assert workers.changes() == []
    assert workers.changes(9.0) == [("worker_lost", "rollout-0", "warning")]


def test_a_drained_worker_is_not_lost() -> None:
    workers = Workers()
    workers.beat("rollout-0")
    workers.beat("trainer-0", service="trainer")
    workers.changes()
    workers.beat("rollout-0", ready=False)
    assert workers.changes(9.0) == [("worker_lost", "trainer-0", "warning")]
    workers.beat("rollout-0")
    assert workers.changes() == [], "a worker that was started again was never missed"


def test_a_problem_of_a_worker_is_reported_once_and_the_next_one_not_too_soon() -> None:
    workers, watch = Workers(), ProblemWatch("job_1")

    def new(problem: str, worker: str = "rollout-0") -> list[str]:
        workers.beat(worker, job_1={"problem": problem} if problem else {"version": 0}, job_2={"problem": "another's"})
        return [f"{name}: {text}" for _, name, text in watch.new(workers.members, SERVICES, workers.clock)]

    workers.beat("reward-0", service="reward", job_1={"problem": "of a service that the job does not need"})
    assert new("no room: 3 MiB") == ["rollout-0: no room: 3 MiB"]
    assert new("no room: 3 MiB") == new("no room: 4 MiB") == new("") == new("no room: 3 MiB") == []
    assert new("no room: 5 MiB", "rollout-1") == ["rollout-1: no room: 5 MiB"]
    workers.clock += PROBLEM_S
    assert new("no room: 3 MiB") == [], "the same one goes on"
    assert new("no room: 4 MiB") == ["rollout-0: no room: 4 MiB"]
    workers.clock += PROBLEM_S
    assert new("") == []
    assert new("no room: 4 MiB") == ["rollout-0: no room: 4 MiB"], "it was gone"


def test_a_loss_before_the_first_check_is_not_reported() -> None:
    workers = Workers()
    workers.beat("rollout-0")
    assert workers.changes(60.0) == []


def test_the_history_of_a_worker_is_stored_by_job() -> None:
    workers = Workers()
    for clock, row in ((0.0, {}), (1.0, {"running": 2}), (2.0, {"running": 1}), (3.0, {"waiting_for": "version 3"})):
        workers.clock = clock
        workers.beat("rollout-0", job=row)
    workers.clock = 20.0  # it was silent for 17 s
    workers.beat("rollout-0", job={"running": 1}, other={"running": 1})
    workers.beat("rollout-1")
    first, second = workers.members.rows("job", 21.0, history=True)
    assert second["spans"] == []
    assert [(s["kind"], s["wait"], s["start_age_s"], s["end_age_s"]) for s in first["spans"]] == [
        ("waiting", "", 21.0, 21.0), ("busy", "", 21.0, 19.0), ("waiting", "version 3", 19.0, 18.0),
        ("lost", "", 18.0, 1.0), ("busy", "", 1.0, 1.0),
    ]  # fmt: skip
    assert len(workers.members.rows("other", 21.0, history=True)[0]["spans"]) == 1
    assert "spans" not in workers.members.rows("job", 21.0)[0]


def test_a_history_is_bounded() -> None:
    workers = Workers()
    for second in range(MOST_SPANS + 50):
        workers.clock = float(second)
        workers.beat("rollout-0", job={"running": second % 2}, short={"running": 1} if second < 5 else {})
    (row,) = workers.members.rows("job", workers.clock, history=True)
    assert len(row["spans"]) == MOST_SPANS
    (row,) = workers.members.rows("job", workers.clock + HISTORY_S - 5, history=True)
    assert 0 < len(row["spans"]) < MOST_SPANS, "what is older is shown no more"
    workers.clock += HISTORY_S + 1
    workers.beat("rollout-0", new={"running": 1})
    (row,) = workers.members.rows("job", workers.clock, history=True)
    assert row["spans"] == []
