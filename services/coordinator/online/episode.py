"""One episode whose turns are not decided yet. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from penstock.services.coordinator.online.admission import Decision, admit, counted, refusal_of
from penstock.services.coordinator.online.canary import Earned, earned_by
from penstock.services.coordinator.online.credit import Item, Trajectory, Turn, joined, returns
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.interaction import CANARY, NOT_COMPARED, Feedback, Interaction

__all__ = ["CUT", "UNKNOWN", "Episode", "Outcome"]

UNKNOWN = 1 << 62
"""Above every sequence."""
CUT = "client_disconnected"
"""How an answer ends that was broken off: nobody seemed to wait for it."""
REASONS = ("invalid", "feedback", "default", "credit")
"""What stands for a trajectory of several turns, the strongest first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode comes to: trajectories to train, and turns that are never trained, each with the reason.

    ``earned``: what it says of the version that answered it, where versions are compared.
    """

    trajectories: list[Trajectory]
    refused: list[tuple[Turn, str]]
    earned: Earned | None = None


@dataclass(slots=True)
class Episode:
    """Turns in the order of their requests, and what was said of the whole.

    ``single``: no turn will follow (a request without an episode, or a job without credit over turns).
    """

    single: bool
    turns: list[Turn] = field(default_factory=list)
    items: dict[str, Item] = field(default_factory=dict)

    @property
    def asker(self) -> str:
        """The key that its first answer was served to."""
        return self.turns[0].interaction.key_id if self.turns else ""

    @property
    def users(self) -> set[str]:
        """Whose conversation it is (HMAC)."""
        return {turn.interaction.user for turn in self.turns}

    @property
    def last_active(self) -> float:
        """When its newest answer ended."""
        return max((turn.interaction.ended for turn in self.turns), default=0.0)

    @property
    def begun(self) -> float:
        """When its first request came."""
        return min((turn.interaction.started for turn in self.turns), default=0.0)

    @property
    def lowest(self) -> tuple[int, int]:
        """Lowest sequences of its interactions and of its feedback; a large number where there is none."""
        first = min((turn.seq for turn in self.turns), default=UNKNOWN)
        return first, min((item.seq for item in self._said()), default=UNKNOWN)

    def add(self, turn: Turn) -> None:
        """Take a turn in; they may arrive in any order."""
        self.turns.append(turn)
        self.turns.sort(key=lambda one: (one.interaction.started, one.interaction.id))

    def complete(self, seq: int, interaction: Interaction) -> bool:
        """Put a whole answer in the place of what was recorded when it was broken off; False where that is not so."""
        for turn in self.turns:
            if turn.interaction.id == interaction.id and turn.interaction.finish == CUT != interaction.finish:
                turn.seq, turn.interaction, turn.refusal = seq, interaction, None
                return True
        return False

    def settle(self, job: OnlineJob, *, version: int, now: float) -> Outcome | None:
        """What it comes to; None while something is missing."""
        if not self.turns:
            return None
        idle = now - self.last_active >= job.online.idle_ttl_s
        closed = self._closed(job) or now - self.begun >= job.online.max_age_s
        if not (self.single or closed or idle):
            return None
        said = [self._said_of(place) for place in range(len(self.turns))]
        rated = any(counted(items) for items in said)
        for turn in self.turns:
            if turn.refusal is None:  # facts alone decide it: once, however often the episode is looked at
                turn.refusal = refusal_of(turn.interaction, job)
        decisions = [
            admit(
                turn.interaction, said[place], job, version=version, now=now,
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
        return bool(judged) and judged <= {item.feedback.metric for item in self._said() if item.feedback.weight > 0}

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
        earned = earned_by(job, self.turns, decisions, self._judges(0))
        if any(turn.refusal in (CANARY, NOT_COMPARED) for turn in self.turns):  # no turn learns from what followed it
            return Outcome([], [(turn, CANARY) for turn in self.turns], earned)
        values = returns([decision.reward for decision in decisions], job.online.gamma)
        decisions = [_worth_it(decision, value, job) for decision, value in zip(decisions, values, strict=True)]
        good = [place for place, decision in enumerate(decisions) if decision.verdict == "train"]
        refused = [(self.turns[p], decisions[p].reason) for p in range(len(decisions)) if p not in good]
        trajectories = []
        for places in self._runs(good, decisions, values):
            feedback = {name: item for place in places for name, item in self.turns[place].items.items()}
            if places[-1] == good[-1]:  # what was said of refused turns counts by credit
                feedback |= self.items | {name: item for turn, _ in refused for name, item in turn.items.items()}
            judges = self._judges(places[0])
            reason = _reason([decisions[place] for place in places], [values[place] for place in places], judges)
            turns = tuple(self.turns[place] for place in places)
            trajectories.append(
                Trajectory(turns, values[places[-1]], reason, feedback, judges, decisions[places[0]].objective)
            )
        return Outcome(trajectories, refused, earned)

    def _runs(self, good: list[int], decisions: list[Decision], values: list[float]) -> Iterator[list[int]]:
        """Places of turns that make one trajectory each; those of different objectives never share one."""
        for _, group in groupby(good, key=lambda place: decisions[place].objective):
            places = list(group)
            for run in joined([self.turns[place] for place in places], [values[place] for place in places]):
                yield [places[index] for index in run]

    def _judges(self, place: int) -> tuple[str, ...]:
        """Keys whose feedback decides over a turn: what later ones earned comes back to it."""
        said = [*self.items.values(), *(item for turn in self.turns[place:] for item in turn.items.values())]
        counting = (item.feedback for item in said if item.feedback.metric and item.feedback.weight > 0)
        return tuple(sorted({item.key_id for item in counting}))


def _reason(decisions: Sequence[Decision], values: Sequence[float], judges: Collection[str]) -> str:
    """What stands for a trajectory, whose turns have these returns.

    `invalid` only where nobody said anything, or it is all of every return: else a broken turn would hide that a new
    source has its part in it.
    """
    reasons = [decision.reason for decision in decisions]
    alone = all(
        decision.reason == "invalid" and decision.reward == value
        for decision, value in zip(decisions, values, strict=True)
    )
    if judges and not alone:
        reasons = [reason for reason in reasons if reason != "invalid"]
    return next((name for name in REASONS if name in reasons), "credit")


def _worth_it(decision: Decision, value: float, job: OnlineJob) -> Decision:
    """The decision on a turn once its return is known: only good answers are imitated."""
    off_policy = job.online.off_policy
    if decision.objective == "policy" or off_policy is None or off_policy.supervised is None:
        return decision
    if value >= off_policy.supervised.min_reward:
        return decision
    return Decision("reject", decision.denied, decision.reward)
