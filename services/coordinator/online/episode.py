"""One episode whose turns are not decided yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.services.coordinator.online.admission import Decision, admit, refusal_of
from penstock.services.coordinator.online.credit import Item, Trajectory, Turn, joined, returns
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.interaction import Feedback

__all__ = ["UNKNOWN", "Episode", "Outcome"]

UNKNOWN = 1 << 62
"""Above every sequence."""
REASONS = ("invalid", "feedback", "default", "credit")
"""What stands for a trajectory of several turns, the strongest first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode comes to: trajectories to train, and turns that are never trained, each with the reason."""

    trajectories: list[Trajectory]
    refused: list[tuple[Turn, str]]


@dataclass(slots=True)
class Episode:
    """Turns in the order of their requests, and what was said of the whole.

    ``single``: no turn will follow (a request without an episode, or a job without credit over turns).
    """

    single: bool
    turns: list[Turn] = field(default_factory=list)
    items: dict[str, Item] = field(default_factory=dict)

    @property
    def last_active(self) -> float:
        """When its newest answer ended."""
        return max((turn.interaction.ended for turn in self.turns), default=0.0)

    @property
    def lowest(self) -> tuple[int, int]:
        """Lowest sequences of its interactions and of its feedback; a large number where there is none."""
        first = min((turn.seq for turn in self.turns), default=UNKNOWN)
        return first, min((item.seq for item in self._said()), default=UNKNOWN)

    def add(self, turn: Turn) -> None:
        """Take a turn in; they may arrive in any order."""
        self.turns.append(turn)
        self.turns.sort(key=lambda one: (one.interaction.started, one.interaction.id))

    def settle(self, job: OnlineJob, *, version: int, now: float) -> Outcome | None:
        """What it comes to; None while something is missing."""
        if not self.turns:
            return None
        idle = now - self.last_active >= job.online.idle_ttl_s
        closed = self._closed(job)
        if not (self.single or closed or idle):
            return None
        rated = any(item.feedback.metric for item in self._said())
        for turn in self.turns:
            if turn.refusal is None:  # facts alone decide it: once, however often the episode is looked at
                turn.refusal = refusal_of(turn.interaction, job)
        decisions = [
            admit(
                turn.interaction, self._said_of(place), job, version=version, now=now,
                last=place == len(self.turns) - 1, closed=closed or idle, rated=rated, refusal=turn.refusal,
            )
            for place, turn in enumerate(self.turns)
        ]  # fmt: skip
        if any(decision.verdict == "wait" for decision in decisions):
            return None
        return self._outcome(job, decisions)

    def _closed(self, job: OnlineJob) -> bool:
        """Whether somebody said that it is over: by `final`, or by every metric that judges the whole."""
        if any(item.feedback.final for item in self._said()):
            return True
        judged = {name for name, metric in job.online.metrics.items() if metric.level == "episode"}
        return bool(judged) and judged <= {item.feedback.metric for item in self._said()}

    def _said(self) -> list[Item]:
        return [*self.items.values(), *(item for turn in self.turns for item in turn.items.values())]

    def _said_of(self, place: int) -> list[Feedback]:
        """Feedback on one turn; what was said of the whole, or of a turn by number, goes to that turn or the last."""
        said = [item.feedback for item in self.turns[place].items.values()]
        for item in self.items.values():
            target = item.feedback.turn if 0 <= item.feedback.turn < len(self.turns) else len(self.turns) - 1
            if target == place and item.feedback.metric:
                said.append(item.feedback)
        return said

    def _outcome(self, job: OnlineJob, decisions: list[Decision]) -> Outcome:
        values = returns([decision.reward for decision in decisions], job.online.gamma)
        good = [place for place, decision in enumerate(decisions) if decision.verdict == "train"]
        refused = [(self.turns[p], decisions[p].reason) for p in range(len(decisions)) if p not in good]
        trajectories = []
        for run in joined([self.turns[place] for place in good], [values[place] for place in good]):
            places = [good[index] for index in run]
            feedback = {name: item for place in places for name, item in self.turns[place].items.items()}
            if places[-1] == good[-1]:  # what was said of refused turns counts by credit
                feedback |= self.items | {name: item for turn, _ in refused for name, item in turn.items.items()}
            reasons = [decisions[place].reason for place in places]
            reason = next(name for name in REASONS if name in reasons)
            turns = tuple(self.turns[place] for place in places)
            trajectories.append(Trajectory(turns, values[places[-1]], reason, feedback))
        return Outcome(trajectories, refused)
