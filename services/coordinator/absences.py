"""Workers that a job needs and that are gone without having said so. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from penstock.services.coordinator.members import Members

__all__ = ["Absence", "Absences"]


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker was lost, or is back."""

    type: Literal["worker_lost", "worker_back"]
    service: str
    worker: str
    text: str

    @property
    def level(self) -> str:
        """How bad that is."""
        return "warning" if self.type == "worker_lost" else "info"


class Absences:
    """Tells of each loss once, and once of each return. Who drained before the end is not lost."""

    def __init__(self) -> None:
        self._present: set[tuple[str, str]] = set()
        self._lost: set[tuple[str, str]] = set()

    def look(self, members: Members, services: Collection[str], clock: float) -> list[Absence]:
        """Changes since the last look, of these services."""
        found: list[Absence] = []
        for member in members.everybody():
            beat, who = member.beat, (member.beat.service, member.beat.worker)
            if beat.service not in services:
                continue
            if member.alive(clock):
                if who in self._lost:
                    found.append(Absence("worker_back", *who, f"{beat.service} worker '{beat.worker}' is back"))
                self._lost.discard(who)
                self._present.add(who)
            elif who in self._present:
                self._present.discard(who)
                if beat.ready:
                    self._lost.add(who)
                    text = f"{beat.service} worker '{beat.worker}' gives no sign since {clock - member.heard:.1f} s"
                    found.append(Absence("worker_lost", *who, text))
        return found
