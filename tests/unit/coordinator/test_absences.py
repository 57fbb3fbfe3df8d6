"""Workers that are lost are told of once; those that drained are not lost."""

from __future__ import annotations

from typing import Any

from penstock.services.coordinator.absences import Absences
from penstock.services.coordinator.members import Members
from penstock.shared.protocol.messages import Heartbeat

SERVICES = ("rollout", "trainer")


class Crowd:
    """Members whose clock the test sets."""

    def __init__(self) -> None:
        self.members, self.absences, self.clock = Members(), Absences(), 0.0

    def beat(self, worker: str, *, service: str = "rollout", ready: bool = True) -> None:
        beat = Heartbeat(
            service=service, worker=worker, host="h", pid=1, started=0.0, interval_s=1.0, health_port=0, ready=ready,
            jobs={},
        )  # fmt: skip
        self.members.on_heartbeat(beat, self.clock)

    def look(self, after_s: float = 0.0) -> list[tuple[Any, ...]]:
        self.clock += after_s
        found = self.absences.look(self.members, SERVICES, self.clock)
        return [(one.type, one.worker, one.level) for one in found]


def test_a_loss_and_a_return_are_told_once() -> None:
    crowd = Crowd()
    crowd.beat("rollout-0")
    crowd.beat("reward-0", service="reward")
    assert crowd.look() == []
    assert crowd.look(3.0) == []
    assert crowd.look(2.0) == [("worker_lost", "rollout-0", "warning")], "and not who this job does not need"
    assert crowd.look(5.0) == []
    crowd.beat("rollout-0")
    assert crowd.look() == [("worker_back", "rollout-0", "info")]
    assert crowd.look() == []
    assert crowd.look(9.0) == [("worker_lost", "rollout-0", "warning")]


def test_who_said_goodbye_is_not_lost() -> None:
    crowd = Crowd()
    crowd.beat("rollout-0")
    crowd.beat("trainer-0", service="trainer")
    crowd.look()
    crowd.beat("rollout-0", ready=False)
    assert crowd.look(9.0) == [("worker_lost", "trainer-0", "warning")]
    crowd.beat("rollout-0")
    assert crowd.look() == [], "a worker that was started again was never missed"


def test_who_was_lost_before_the_first_look_is_nobodys_news() -> None:
    crowd = Crowd()
    crowd.beat("rollout-0")
    assert crowd.look(60.0) == []
