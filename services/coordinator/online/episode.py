"""One episode whose turns are not decided yet. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from penstock.services.coordinator.online.admission import (
    MASKED,
    UNFINISHED,
    Decision,
    admit,
    counted,
    is_invalid,
    level_of,
    refusal_of,
    reward_of_whole,
)
from penstock.services.coordinator.online.bounds import OVER_SHARE, within_bounds
from penstock.services.coordinator.online.branches import ROOT, Said, Tree, tree_of
from penstock.services.coordinator.online.canary import Earned, earned_by
from penstock.services.coordinator.online.credit import (
    Item,
    Trajectory,
    Turn,
    joined,
    owners_of_turns,
    returns,
    weights_of,
)
from penstock.services.coordinator.online.lateness import first_late, said_before, turns_before
from penstock.services.coordinator.online.names import canonical
from penstock.services.coordinator.online.posted_episodes import EPISODE_OVER
from penstock.services.coordinator.online.shares import Owners
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.interaction import CANARY, NOT_COMPARED, Feedback, Interaction

__all__ = ["CUT", "UNKNOWN", "Episode", "Outcome"]

UNKNOWN = 1 << 62
"""Above every sequence."""
CUT = "client_disconnected"
"""How an answer ends that was broken off: nobody seemed to wait for it."""
ROUNDING_S = 1.0
"""So long after a moment it is looked at again: sums and differences of times do not agree to the last bit."""
ALONE = Tree((ROOT,), (False,))
"""Of one turn: nothing to look for."""
REASONS = (*sorted(MASKED), "invalid", "feedback", "default", "credit")
"""What stands for a trajectory of several turns, the strongest first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode comes to: trajectories to train, and turns that are never trained, each with the reason.

    ``earned``: what it says of the version that answered it, where versions are compared.
    """

    trajectories: list[Trajectory]
    refused: list[tuple[Turn, str]]
    earned: Earned | None = None

    @property
    def reasons(self) -> dict[str, str]:
        """Why each of these turns, by canonical id, is never trained on."""
        return {canonical(turn.interaction.id): reason for turn, reason in self.refused}

    def without(self, objects: Callable[[str], bool], reason: str) -> Outcome:
        """The same without the trajectories of users (HMAC) who do not want to be trained on: refused for ``reason``.

        What was said of these counts by credit, as of other turns that are refused: it goes with the last one left.
        """
        left, out = list[Trajectory](), list[Trajectory]()
        for one in self.trajectories:
            (out if any(objects(turn.interaction.user) for turn in one.turns) else left).append(one)
        if left and out:
            said = {name: item for one in out for name, item in one.feedback.items()}
            left[-1] = replace(left[-1], feedback=left[-1].feedback | said)
        return replace(
            self, trajectories=left, refused=[*self.refused, *((t, reason) for one in out for t in one.turns)]
        )


@dataclass(slots=True)
class Episode:
    """Turns in the order of their requests, and what was said of the whole.

    ``single``: no turn will follow (a request without an episode, or a job without credit over turns).
    """

    single: bool
    turns: list[Turn] = field(default_factory=list)
    items: dict[str, Item] = field(default_factory=dict)
    place: int = 0
    """Among the episodes of its job, in the order in which they began."""
    due: float = field(default=0.0, init=False)
    """While something is missing: when time alone may change that. Infinity: only a fact or a version can."""
    _tree: tuple[tuple[int, ...], Tree] = field(default=((), Tree((), ())), init=False, repr=False)
    """The sequences of the turns that it is of, and their tree."""

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
    def said_ids(self) -> list[str]:
        """Ids of all that was said of it."""
        return [item.feedback.id for item in self._said()]

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

    def holder(self, name: str) -> tuple[dict[str, Item], str]:
        """What holds the feedback on a turn (canonical id), or the whole, and the key that it was served to."""
        for turn in self.turns:
            if canonical(turn.interaction.id) == name:
                return turn.items, turn.interaction.key_id
        return self.items, self.asker

    def settle(self, job: OnlineJob, *, version: int, now: float) -> Outcome | None:
        """What it comes to; None while something is missing.

        What came when it was over by time changes nothing where it had come to nothing: a leader that reads all of it
        at once finds what the one found that saw it end.
        """
        if not self.turns:
            return None
        outcome = self._refused_before(job, now) or self._settle(job, version=version, now=now)
        self.due = math.inf if outcome is not None else self._due(job, now)
        return outcome

    def _due(self, job: OnlineJob, now: float) -> float:
        online, begun = job.online, self.begun
        ends = [begun + online.max_age_s, begun + online.idle_ttl_s, self.last_active + online.idle_ttl_s]
        waits = {metric.default_after_s for metric in online.metrics.values()}
        ends += [turn.interaction.ended + wait for turn in self.turns for wait in waits if wait is not None]
        return min((end for end in ends if end > now - ROUNDING_S), default=math.inf)

    def _refused_before(self, job: OnlineJob, now: float) -> Outcome | None:
        """That it came to nothing, where it was over by time before something else came."""
        if now - self.begun < min(job.online.idle_ttl_s, job.online.max_age_s):
            return None
        late = first_late(self.turns, self.items, job)
        if late is None:
            return None
        early = Episode(self.single, turns_before(self.turns, late), said_before(self.items, late))
        if not early.turns:
            return None
        newest = max((span.version for turn in early.turns for span in turn.interaction.spans), default=0)
        outcome = early._settle(job, version=newest, now=late)  # whatever versions came meanwhile
        if outcome is None or outcome.trajectories:
            return None
        behind = [(turn, EPISODE_OVER) for turn in self.turns if turn.interaction.ended >= late]
        return replace(outcome, refused=behind + outcome.refused)

    def _settle(self, job: OnlineJob, *, version: int, now: float) -> Outcome | None:
        idle = now - self.last_active >= job.online.idle_ttl_s
        closed = self._closed(job) or now - self.begun >= job.online.max_age_s
        if not (self.single or closed or idle):
            return None
        said = [self._said_of(place, job) for place in range(len(self.turns))]
        rated = self._rated(said, job)
        for turn in self.turns:
            if turn.refusal is None:  # facts alone decide it: once, however often the episode is looked at
                turn.refusal = refusal_of(turn.interaction, job)
        decisions = [
            admit(
                turn.interaction, said[place], job, version=version, now=now,
                last=place == len(self.turns) - 1, closed=closed or idle, rated=rated[place], refusal=turn.refusal,
            )
            for place, turn in enumerate(self.turns)
        ]  # fmt: skip
        if any(decision.verdict == "wait" for decision in decisions):
            return None
        if job.online.unfinished == "mask" and not (self.single or self._closed(job)):
            decisions = [_unfinished(decision) for decision in decisions]
        return self._outcome(job, said, decisions)

    @property
    def tree(self) -> Tree:
        """Which of its turns goes on from which: looked for once, however often the episode is looked at."""
        if len(self.turns) == 1:
            return ALONE
        seqs = tuple(turn.seq for turn in self.turns)
        if self._tree[0] != seqs:
            found = (turn.interaction for turn in self.turns)
            self._tree = seqs, tree_of([Said.of(one.prompt_ids, one.token_ids) for one in found])
        return self._tree[1]

    def _rated(self, said: Sequence[Sequence[Feedback]], job: OnlineJob) -> list[bool]:
        """Whether something was said of the conversation that each turn is of, or of the whole episode."""
        roots, words = self.tree.roots, [counted(items, job.online) for items in said]
        rated = {root for root, said_of_it in zip(roots, words, strict=True) if said_of_it}
        whole = any(level == "episode" for said_of_it in words for _, level in said_of_it)
        return [whole or root in rated for root in roots]

    def _closed(self, job: OnlineJob) -> bool:
        """Whether somebody said that it is over: by `final`, or by every metric that judges the whole."""
        if any(item.feedback.final for item in self._said()):
            return True
        judged = {name for name, metric in job.online.metrics.items() if metric.level == "episode"}
        return bool(judged) and judged <= {item.feedback.metric for item in self._said() if item.feedback.weight > 0}

    def _said(self) -> list[Item]:
        return [*self.items.values(), *(item for turn in self.turns for item in turn.items.values())]

    def _said_of(self, place: int, job: OnlineJob) -> list[Feedback]:
        """Feedback on one turn; what was said of the whole, or of a turn by number, goes to that turn or the last."""
        said = [item.feedback for item in self.turns[place].items.values()]
        return said + [
            item.feedback
            for item in self.items.values()
            if self._target(item.feedback, job) == place and item.feedback.metric
        ]

    def _target(self, feedback: Feedback, job: OnlineJob) -> int:
        """The turn that something is about which names the episode; of the whole the last one."""
        is_numbered = 0 <= feedback.turn < len(self.turns) and not _is_of_whole(feedback, job)
        return feedback.turn if is_numbered else len(self.turns) - 1

    def _outcome(self, job: OnlineJob, said: Sequence[Sequence[Feedback]], decisions: list[Decision]) -> Outcome:
        earned = earned_by(job, self.turns, decisions, _judges(self._said(), job))
        if any(turn.refusal in (CANARY, NOT_COMPARED) for turn in self.turns):  # no turn learns from what followed it
            return Outcome([], [(turn, CANARY) for turn in self.turns], earned)
        tree = self.tree
        counts = [
            decision.verdict == "train" or bool(counted(items, job.online))
            for decision, items in zip(decisions, said, strict=True)
        ]  # fmt: skip
        values = returns(self._rewards(job, said, decisions), job.online.gamma, tree, counts)
        decisions = [_worth_it(decision, value, job) for decision, value in zip(decisions, values, strict=True)]
        kinds = {
            place: (one.objective, one.reason in MASKED)
            for place, one in enumerate(decisions)
            if one.verdict == "train"
        }
        temperatures = [turn.interaction.sampling.temperature for turn in self.turns]
        parts = within_bounds(
            job, kinds,
            lambda left: joined(tree, {place: kinds[place] for place in left}, values, temperatures),
            lambda places: (self._owners(places, job), kinds[places[0]][0]),
        )  # fmt: skip
        reasons = [OVER_SHARE if place in kinds else decision.reason for place, decision in enumerate(decisions)]
        trained = {place for places in parts for place in places}
        refused = [(self.turns[place], reason) for place, reason in enumerate(reasons) if place not in trained]
        own = [places for places in parts if kinds[places[0]] == ("policy", False)]
        shares = weights_of(job, tree, own, [len(turn.interaction.token_ids) for turn in self.turns])
        trajectories = []
        for places in parts:
            feedback = {name: item for place in places for name, item in self.turns[place].items.items()}
            if places[-1] == max(trained):  # what was said of refused turns counts by credit
                feedback |= self.items | {name: item for turn, _ in refused for name, item in turn.items.items()}
            judges = _judges(self._concerning(places[0], job), job)
            reason = _reason([decisions[place] for place in places], [values[place] for place in places], judges)
            turns, (objective, _) = tuple(self.turns[place] for place in places), kinds[places[0]]
            share = shares.get(places[0], 1.0)
            trajectories.append(Trajectory(turns, values[places[-1]], reason, feedback, judges, objective, share))
        return Outcome(trajectories, refused, earned)

    def _rewards(
        self, job: OnlineJob, said: Sequence[Sequence[Feedback]], decisions: Sequence[Decision]
    ) -> list[float]:
        """What each turn earned by itself; the last one of every branch has what the whole episode earned, too."""
        rewards, whole = [decision.reward for decision in decisions], reward_of_whole(said[-1], job)
        last = len(rewards) - 1  # has it already
        for place in set(range(last)) - set(self.tree.parents):
            if not is_invalid(self.turns[place].interaction, job):
                rewards[place] += whole
        return rewards

    def _owners(self, places: Sequence[int], job: OnlineJob) -> Owners:
        """Who has a share of the batch by a trajectory of these turns."""
        judges = _judges(self._concerning(places[0], job), job)
        return owners_of_turns([self.turns[place] for place in places], judges)

    def _concerning(self, place: int, job: OnlineJob) -> list[Item]:
        """What was said of a turn and of those that go on from it, of the whole, or by number of its conversation."""
        roots = self.tree.roots
        of_episode = [
            item
            for item in self.items.values()
            if _is_of_whole(item.feedback, job) or roots[self._target(item.feedback, job)] == roots[place]
        ]
        return of_episode + [item for later in self.tree.below(place) for item in self.turns[later].items.values()]


def _is_of_whole(feedback: Feedback, job: OnlineJob) -> bool:
    return level_of(feedback, job.online) == "episode"


def _judges(said: Iterable[Item], job: OnlineJob) -> tuple[str, ...]:
    """Keys whose feedback decides over what it concerns: what later turns earned comes back to earlier ones."""
    counting = (one.feedback for one in said if level_of(one.feedback, job.online) and one.feedback.weight > 0)
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


def _unfinished(decision: Decision) -> Decision:
    """The decision on a turn of an episode that nobody ended: nothing learns from its tokens."""
    if decision.verdict != "train":
        return decision
    if decision.objective == "policy":
        return replace(decision, reason=UNFINISHED)
    return replace(decision, verdict="reject", reason=decision.denied, compared=True)  # as in the arm on trial


def _worth_it(decision: Decision, value: float, job: OnlineJob) -> Decision:
    """The decision on a turn once its return is known: only good answers are imitated."""
    off_policy = job.online.off_policy
    if decision.objective == "policy" or off_policy is None or off_policy.supervised is None:
        return decision
    if value >= off_policy.supervised.min_reward:
        return decision
    return Decision("reject", decision.denied, decision.reward)
