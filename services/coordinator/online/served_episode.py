"""Settles episodes that the gateway served: from turns and feedback to trajectories and refusals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.services.coordinator.online.admission import (
    MASKED,
    UNFINISHED,
    Decision,
    admit,
    counted_feedback,
    is_invalid,
    level_of,
    refusal_of,
    reward_of_whole,
)
from penstock.services.coordinator.online.fairness import OVER_SHARE, Owners, within_bounds
from penstock.services.coordinator.online.posted_episode import EPISODE_OVER
from penstock.services.coordinator.online.trials import TrialSample, trial_sample_of
from penstock.services.coordinator.online.turns import (
    DISCONNECTED,
    ROOT,
    FeedbackItem,
    Trajectory,
    Turn,
    TurnTokens,
    TurnTree,
    canonical_id,
    join_turns,
    owners_of_turns,
    returns,
    trajectory_weights,
    turn_tree,
)
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.live.interaction import CANARY, NOT_COMPARED, Feedback, Interaction

__all__ = ["EpisodeOutcome", "ServedEpisode", "feedback_before", "first_late_time", "turns_before"]

ROUNDING_S = 1.0
"""An episode is checked again up to this long after a deadline, because sums of times are not exact."""
REASONS = (*sorted(MASKED), "invalid", "feedback", "default", "credit")
"""Reasons of a trajectory with several turns, the strongest first."""


SINGLE_TURN = TurnTree((ROOT,), (False,))
"""Tree of a single turn."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """Outcome of an episode: trajectories to train, and refused turns with their reasons.

    ``trial_sample`` is its result for a canary trial, if one compares versions.
    """

    trajectories: list[Trajectory]
    refused: list[tuple[Turn, str]]
    trial_sample: TrialSample | None = None

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons of the refused turns by canonical id."""
        return {canonical_id(turn.interaction.id): reason for turn, reason in self.refused}

    def without_objectors(self, objects: Callable[[str], bool], reason: str) -> EpisodeOutcome:
        """Refuse, for ``reason``, the trajectories of users (HMAC) who opted out of training.

        Feedback on these counts by credit, as for other refused turns: it moves to the last trajectory left.
        """
        left, out = list[Trajectory](), list[Trajectory]()
        for one in self.trajectories:
            (out if any(objects(turn.interaction.user) for turn in one.turns) else left).append(one)
        if left and out:
            feedback_by_turn = {name: item for one in out for name, item in one.feedback.items()}
            left[-1] = replace(left[-1], feedback=left[-1].feedback | feedback_by_turn)
        return replace(
            self, trajectories=left, refused=[*self.refused, *((t, reason) for one in out for t in one.turns)]
        )


@dataclass(slots=True)
class ServedEpisode:
    """Turns of a served episode in the order of their requests, and the feedback on the whole episode.

    ``single``: no further turn can come (a request without an episode, or a job without credit across turns).
    """

    single: bool
    turns: list[Turn] = field(default_factory=list)
    items: dict[str, FeedbackItem] = field(default_factory=dict)
    place: int = 0
    """Position of the episode among those of the job, by start."""
    due: float = field(default=0.0, init=False)
    """While something is missing: the next time that may change the outcome; infinity if no time can."""
    _tree: tuple[tuple[int, ...], TurnTree] = field(default=((), TurnTree((), ())), init=False, repr=False)
    """Sequences of the turns, and the tree built for them."""

    @property
    def asker(self) -> str:
        """API key that received the first answer."""
        return self.turns[0].interaction.key_id if self.turns else ""

    @property
    def users(self) -> set[str]:
        """Pseudonyms (HMAC) of its users."""
        return {turn.interaction.user for turn in self.turns}

    @property
    def last_active(self) -> float:
        """When the newest answer ended."""
        return max((turn.interaction.ended for turn in self.turns), default=0.0)

    @property
    def started(self) -> float:
        """When the first request arrived."""
        return min((turn.interaction.started for turn in self.turns), default=0.0)

    @property
    def feedback_ids(self) -> list[str]:
        """Ids of all feedback on the episode and its turns."""
        return [item.feedback.id for item in self._all_feedback()]

    def add(self, turn: Turn) -> None:
        """Add a turn; turns may arrive in any order."""
        self.turns.append(turn)
        self.turns.sort(key=lambda one: (one.interaction.started, one.interaction.id))

    def complete(self, seq: int, interaction: Interaction) -> bool:
        """Replace an answer recorded at a disconnect by the complete one; return False if there is none to replace."""
        for turn in self.turns:
            if turn.interaction.id == interaction.id and turn.interaction.finish == DISCONNECTED != interaction.finish:
                turn.seq, turn.interaction, turn.refusal = seq, interaction, None
                return True
        return False

    def holder(self, name: str) -> tuple[dict[str, FeedbackItem], str]:
        """Return the feedback on a turn (canonical id), else on the whole, and the API key that received the answer."""
        for turn in self.turns:
            if canonical_id(turn.interaction.id) == name:
                return turn.items, turn.interaction.key_id
        return self.items, self.asker

    def settle(self, job: OnlineJob, *, version: int, now: float) -> EpisodeOutcome | None:
        """Return the outcome, or None while something is missing.

        If the episode timed out without a trajectory, later facts do not change that. So a leader that reads all facts
        at once gets the same outcome as the leader at that time.
        """
        if not self.turns:
            return None
        outcome = self._outcome_before_late_facts(job, now) or self._settle(job, version=version, now=now)
        self.due = math.inf if outcome is not None else self._next_due(job, now)
        return outcome

    def _next_due(self, job: OnlineJob, now: float) -> float:
        online, begun = job.online, self.started
        ends = [begun + online.max_age_s, begun + online.idle_ttl_s, self.last_active + online.idle_ttl_s]
        waits = {metric.default_after_s for metric in online.metrics.values()}
        ends += [turn.interaction.ended + wait for turn in self.turns for wait in waits if wait is not None]
        return min((end for end in ends if end > now - ROUNDING_S), default=math.inf)

    def _outcome_before_late_facts(self, job: OnlineJob, now: float) -> EpisodeOutcome | None:
        """Return the outcome of an episode that ended without a trajectory before a late fact arrived, or None."""
        if now - self.started < min(job.online.idle_ttl_s, job.online.max_age_s):
            return None
        late = first_late_time(self.turns, self.items, job)
        if late is None:
            return None
        early = ServedEpisode(self.single, turns_before(self.turns, late), feedback_before(self.items, late))
        if not early.turns:
            return None
        newest = max((span.version for turn in early.turns for span in turn.interaction.spans), default=0)
        outcome = early._settle(job, version=newest, now=late)  # ignores versions that came later
        if outcome is None or outcome.trajectories:
            return None
        behind = [(turn, EPISODE_OVER) for turn in self.turns if turn.interaction.ended >= late]
        return replace(outcome, refused=behind + outcome.refused)

    def _settle(self, job: OnlineJob, *, version: int, now: float) -> EpisodeOutcome | None:
        idle = now - self.last_active >= job.online.idle_ttl_s
        closed = self._is_closed(job) or now - self.started >= job.online.max_age_s
        if not (self.single or closed or idle):
            return None
        feedback_by_turn = [self._feedback_on(place, job) for place in range(len(self.turns))]
        rated = self._rated(feedback_by_turn, job)
        for turn in self.turns:
            if turn.refusal is None:  # facts alone decide this, so one computation is enough
                turn.refusal = refusal_of(turn.interaction, job)
        decisions = [
            admit(
                turn.interaction, feedback_by_turn[place], job, version=version, now=now,
                last=place == len(self.turns) - 1, closed=closed or idle, rated=rated[place], refusal=turn.refusal,
            )
            for place, turn in enumerate(self.turns)
        ]  # fmt: skip
        if any(decision.verdict == "wait" for decision in decisions):
            return None
        if job.online.unfinished == "mask" and not (self.single or self._is_closed(job)):
            decisions = [_unfinished(decision) for decision in decisions]
        return self._outcome(job, feedback_by_turn, decisions)

    @property
    def tree(self) -> TurnTree:
        """Tree of its turns; cached until the turns change."""
        if len(self.turns) == 1:
            return SINGLE_TURN
        seqs = tuple(turn.seq for turn in self.turns)
        if self._tree[0] != seqs:
            found = (turn.interaction for turn in self.turns)
            self._tree = seqs, turn_tree([TurnTokens.of(one.prompt_ids, one.token_ids) for one in found])
        return self._tree[1]

    def _rated(self, feedback_by_turn: Sequence[Sequence[Feedback]], job: OnlineJob) -> list[bool]:
        """Return for each turn whether its conversation, or the whole episode, has feedback."""
        if not any(feedback_by_turn):
            return [False] * len(self.turns)
        roots, counted = self.tree.roots, [counted_feedback(items, job.online) for items in feedback_by_turn]
        rated = {root for root, on_turn in zip(roots, counted, strict=True) if on_turn}
        whole = any(level == "episode" for on_turn in counted for _, level in on_turn)
        return [whole or root in rated for root in roots]

    def _is_closed(self, job: OnlineJob) -> bool:
        """Return True if feedback ended the episode: with `final`, or with every metric of the whole episode."""
        found = [item.feedback for item in self._all_feedback()]
        if not found or any(feedback.final for feedback in found):
            return bool(found)
        judged = {name for name, metric in job.online.metrics.items() if metric.level == "episode"}
        return bool(judged) and judged <= {feedback.metric for feedback in found if feedback.weight > 0}

    def _all_feedback(self) -> list[FeedbackItem]:
        return [*self.items.values(), *(item for turn in self.turns for item in turn.items.values())]

    def _feedback_on(self, place: int, job: OnlineJob) -> list[Feedback]:
        """Return the feedback on one turn; feedback on the episode goes to its last turn, or to the one it numbers."""
        on_turn = [item.feedback for item in self.turns[place].items.values()]
        return on_turn + [
            item.feedback
            for item in self.items.values()
            if self._target(item.feedback, job) == place and item.feedback.metric
        ]

    def _target(self, feedback: Feedback, job: OnlineJob) -> int:
        """Return the turn that an item on the episode refers to; the last turn for the whole episode."""
        is_numbered = 0 <= feedback.turn < len(self.turns) and not _is_of_whole(feedback, job)
        return feedback.turn if is_numbered else len(self.turns) - 1

    def _outcome(
        self, job: OnlineJob, feedback_by_turn: Sequence[Sequence[Feedback]], decisions: list[Decision]
    ) -> EpisodeOutcome:
        trial_sample = trial_sample_of(job, self.turns, decisions, _judging_keys(self._all_feedback(), job))
        if any(turn.refusal in (CANARY, NOT_COMPARED) for turn in self.turns):
            # No turn may learn from what followed it.
            return EpisodeOutcome([], [(turn, CANARY) for turn in self.turns], trial_sample)
        tree = self.tree
        counts = [
            decision.verdict == "train" or bool(counted_feedback(items, job.online))
            for decision, items in zip(decisions, feedback_by_turn, strict=True)
        ]  # fmt: skip
        values = returns(self._rewards(job, feedback_by_turn, decisions), job.online.gamma, tree, counts)
        decisions = [_only_if_good(decision, value, job) for decision, value in zip(decisions, values, strict=True)]
        kinds = {
            place: (one.objective, one.reason in MASKED)
            for place, one in enumerate(decisions)
            if one.verdict == "train"
        }
        temperatures = [turn.interaction.sampling.temperature for turn in self.turns]
        parts = within_bounds(
            job, kinds,
            lambda left: join_turns(tree, {place: kinds[place] for place in left}, values, temperatures),
            lambda places: (self._owners(places, job), kinds[places[0]][0]),
        )  # fmt: skip
        reasons = [OVER_SHARE if place in kinds else decision.reason for place, decision in enumerate(decisions)]
        trained = {place for places in parts for place in places}
        refused = [(self.turns[place], reason) for place, reason in enumerate(reasons) if place not in trained]
        own = [places for places in parts if kinds[places[0]] == ("policy", False)]
        shares = trajectory_weights(job, tree, own, [len(turn.interaction.token_ids) for turn in self.turns])
        trajectories = []
        for places in parts:
            feedback = {name: item for place in places for name, item in self.turns[place].items.items()}
            if places[-1] == max(trained):  # feedback on refused turns counts by credit
                feedback |= self.items | {name: item for turn, _ in refused for name, item in turn.items.items()}
            judges = _judging_keys(self._feedback_reaching(places[0], job), job)
            reason = _reason([decisions[place] for place in places], [values[place] for place in places], judges)
            turns, (objective, _) = tuple(self.turns[place] for place in places), kinds[places[0]]
            share = shares.get(places[0], 1.0)
            trajectories.append(Trajectory(turns, values[places[-1]], reason, feedback, judges, objective, share))
        return EpisodeOutcome(trajectories, refused, trial_sample)

    def _rewards(
        self, job: OnlineJob, feedback_by_turn: Sequence[Sequence[Feedback]], decisions: Sequence[Decision]
    ) -> list[float]:
        """Return the reward of each turn; the end of every branch also gets the reward of the whole episode."""
        rewards, whole = [decision.reward for decision in decisions], reward_of_whole(feedback_by_turn[-1], job)
        last = len(rewards) - 1  # the last turn has the episode's reward already
        for place in set(range(last)) - set(self.tree.parents):
            if not is_invalid(self.turns[place].interaction, job):
                rewards[place] += whole
        return rewards

    def _owners(self, places: Sequence[int], job: OnlineJob) -> Owners:
        """Return the owners of a trajectory of these turns."""
        judges = _judging_keys(self._feedback_reaching(places[0], job), job)
        return owners_of_turns([self.turns[place] for place in places], judges)

    def _feedback_reaching(self, place: int, job: OnlineJob) -> list[FeedbackItem]:
        """Return the feedback that reaches a turn by credit: on it, its descendants, the whole, or its conversation."""
        roots = self.tree.roots
        of_episode = [
            item
            for item in self.items.values()
            if _is_of_whole(item.feedback, job) or roots[self._target(item.feedback, job)] == roots[place]
        ]
        return of_episode + [item for later in self.tree.below(place) for item in self.turns[later].items.values()]


def _is_of_whole(feedback: Feedback, job: OnlineJob) -> bool:
    return level_of(feedback, job.online) == "episode"


def _judging_keys(items: Iterable[FeedbackItem], job: OnlineJob) -> tuple[str, ...]:
    """Return the API keys whose feedback counts."""
    counting = (one.feedback for one in items if level_of(one.feedback, job.online) and one.feedback.weight > 0)
    return tuple(sorted({item.key_id for item in counting}))


def _reason(decisions: Sequence[Decision], values: Sequence[float], judges: Collection[str]) -> str:
    """Return the reason of a trajectory whose turns have these returns.

    `invalid` is only returned without feedback, or if every return is the reward of an invalid turn alone. Otherwise an
    invalid turn would hide that a new source contributed to the return.
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
    """Mask a turn of an episode that no client ended."""
    if decision.verdict != "train":
        return decision
    if decision.objective == "policy":
        return replace(decision, reason=UNFINISHED)
    return replace(decision, verdict="reject", reason=decision.denied, compared=True)  # as in the arm on trial


def _only_if_good(decision: Decision, value: float, job: OnlineJob) -> Decision:
    """Reject a turn for imitation if its return is too low."""
    off_policy = job.online.off_policy
    if decision.objective == "policy" or off_policy is None or off_policy.supervised is None:
        return decision
    if value >= off_policy.supervised.min_reward:
        return decision
    return Decision("reject", decision.denied, decision.reward)


def first_late_time(turns: Sequence[Turn], items: Mapping[str, FeedbackItem], job: OnlineJob) -> float | None:
    """Return when the first turn or item arrived after the episode had run out of time, or None.

    A turn arrives when its answer ends; a revised item arrived with its first revision.

    Args:
        turns: at least one turn.
        items: feedback on the whole episode.
    """
    first, *later = sorted((turn.interaction for turn in turns), key=lambda one: one.ended)
    facts = [(one.ended, one.started) for one in later]
    facts += [(_arrival(item), math.inf) for item in items.values()]
    facts += [(_arrival(item), math.inf) for turn in turns for item in turn.items.values()]
    active, begun = first.ended, first.started
    for came, started in sorted(facts):
        if came - active >= job.online.idle_ttl_s or came - begun >= job.online.max_age_s:
            return came
        if started < math.inf:
            active, begun = max(active, came), min(begun, started)
    return None


def turns_before(turns: Sequence[Turn], time: float) -> list[Turn]:
    """Return the turns that ended before a time, with the feedback that had arrived by then."""
    return [
        Turn(turn.seq, turn.interaction, feedback_before(turn.items, time), turn.refusal)
        for turn in turns
        if turn.interaction.ended < time
    ]


def feedback_before(items: Mapping[str, FeedbackItem], time: float) -> dict[str, FeedbackItem]:
    """Return the items that arrived before a time."""
    return {name: item for name, item in items.items() if _arrival(item) < time}


def _arrival(item: FeedbackItem) -> float:
    return -math.inf if item.feedback.revision else item.feedback.received
