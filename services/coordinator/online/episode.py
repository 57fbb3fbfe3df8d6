"""Settles episodes: from an episode's turns and feedback, derives trajectories to train, and the reason for each turn
that is refused. Pure.

Life cycle of an episode, whether the gateway served it or a client posted it::

    served: an interaction (INTERACTIONS)      posted: feedback of kind `interaction` (FEEDBACK)
    ServedEpisode, held by Matching            PostedEpisode, held by OffPolicyExamples
                    |                              |
                    +--------------+---------------+
                                   v
            +-------------------------------------------+
        +-> | waiting for turns, feedback or a version  | -- refused, deleted, nothing usable -> rejected
        |   +-------------------------------------------+ -- feedback without a target --------> expired
        |                          | complete, or out of time
    a new fact                     v
        |   +-------------------------------------------+
        +-- | ready: trajectories with their rewards    | -- too old, too many ----------------> rejected
            +-------------------------------------------+
                                   | LiveSource.draw: lag bound, shares, byte budget
                                   v
            +-------------------------------------------+
            | admitted: in the ledger, with a draw      | -- dropped by the gate --------------> rejected
            +-------------------------------------------+
                                   | its batch is trained
                                   v
                                trained

Both classes settle in the same steps. The result is an ``EpisodeOutcome``, or None while the episode waits:

========================  ========================================  ==============================================
step                      served                                    posted
========================  ========================================  ==============================================
complete, or out of time  feedback closes it, or ``idle_ttl_s`` or  all turns up to the final one have arrived, or
                          ``max_age_s`` is over                     ``idle_ttl_s`` or ``max_age_s`` is over
late facts                change nothing if the episode had ended   late turns are rejected
                          without a trajectory
decide on each turn       ``admit``, by feedback, spans and lag     ``admit_posted_for``, by log-probs and version
assign credit             ``returns`` along the tree                ``returns`` along the tree
form trajectories         ``form_trajectories``                     ``form_trajectories``
turns that do not train   are refused, each for its own reason      are admitted with the rest, and count by
                                                                    credit
========================  ========================================  ==============================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Generic, TypeVar

from penstock.services.coordinator.online.admission import (
    AS_SAMPLED,
    MASKED,
    UNFINISHED,
    Decision,
    PolicyState,
    admit,
    admit_posted_for,
    counted_feedback,
    has_reward,
    is_invalid,
    level_of,
    refusal_of,
    refusal_of_posted,
    reward_of_posted,
    reward_of_whole,
)
from penstock.services.coordinator.online.credit import (
    ROOT,
    TurnKind,
    TurnTokens,
    TurnTree,
    branch_ends,
    form_trajectories,
    returns,
    turn_tree,
)
from penstock.services.coordinator.online.examples import OffPolicyExample, posted_example
from penstock.services.coordinator.online.fairness import OVER_SHARE, Owners
from penstock.services.coordinator.online.statuses import same_reason
from penstock.services.coordinator.online.trials import TrialSample, trial_sample_of
from penstock.services.coordinator.online.turns import (
    DISCONNECTED,
    Arrivals,
    FeedbackItem,
    PostedTurn,
    Trajectory,
    Turn,
    canonical_id,
    feedback_before,
    first_late_time,
    is_out_of_time,
    owners_of_turns,
    turns_before,
)
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.live.interaction import CANARY, MAX_TURNS, NOT_COMPARED, Feedback, Interaction

__all__ = [
    "EPISODE_OVER",
    "ROUNDING_S",
    "TOO_MANY_TURNS",
    "EpisodeOutcome",
    "PostedEpisode",
    "ServedEpisode",
    "without_objectors",
]

EPISODE_OVER, TOO_MANY_TURNS = "episode_over", "too_many_turns"
ROUNDING_S = 1.0
"""Seconds before and after a deadline in which an episode is checked again, because sums of times are not exact."""
REASONS = (*sorted(MASKED), "invalid", "feedback", "default", "credit")
"""Reasons of turns, in order of precedence: a trajectory gets the first one that any of its turns has."""
SINGLE_TURN = TurnTree((ROOT,), (False,))
"""Turn tree of an episode that has only one turn."""

T = TypeVar("T", Trajectory, OffPolicyExample)


@dataclass(frozen=True, slots=True)
class EpisodeOutcome(Generic[T]):
    """Outcome of an episode: trajectories to train, and the reasons of refused turns by canonical id.

    ``trial_sample`` is its result for a canary trial, if one compares versions.
    """

    trajectories: list[T]
    refused: dict[str, str]
    trial_sample: TrialSample | None = None


def without_objectors(
    outcome: EpisodeOutcome[Trajectory], objects: Callable[[str], bool], reason: str
) -> EpisodeOutcome[Trajectory]:
    """Return ``outcome`` without the trajectories of users who opted out of training; the turns of these trajectories
    are refused.

    Feedback on the refused turns counts by credit, as for other refused turns: it moves to the last trajectory left.
    ``objects`` returns True for a user (HMAC) who opted out, ``reason`` is the reason of the refusals.
    """
    left, out = list[Trajectory](), list[Trajectory]()
    for one in outcome.trajectories:
        (out if any(objects(turn.interaction.user) for turn in one.turns) else left).append(one)
    if not out:
        return outcome
    if left:
        feedback_by_turn = {name: item for one in out for name, item in one.feedback.items()}
        left[-1] = replace(left[-1], feedback=left[-1].feedback | feedback_by_turn)
    refused = outcome.refused | same_reason((turn for one in out for turn in one.turns), reason)
    return replace(outcome, trajectories=left, refused=refused)


@dataclass(slots=True)
class ServedEpisode:
    """Turns of a served episode in the order of their requests, and the feedback on the whole episode.

    ``single``: no further turn can come (a request without an episode, or a job without credit across turns).
    """

    single: bool
    turns: list[Turn] = field(default_factory=list)
    items: dict[str, FeedbackItem] = field(default_factory=dict)
    place: int = 0
    """Position of the episode in the order in which the job's episodes started."""
    due: float = field(default=0.0, init=False)
    """Time at which an undecided episode is checked again; infinity if only new data can change its outcome."""
    _tree: tuple[tuple[int, ...], TurnTree] = field(default=((), TurnTree((), ())), init=False, repr=False)
    """Cache: the stream sequence numbers of the turns' messages, and the turn tree that was built from these turns."""

    @property
    def asker(self) -> str:
        """API key that received the first answer."""
        return self.turns[0].interaction.key_id if self.turns else ""

    @property
    def users(self) -> set[str]:
        """Pseudonyms (HMAC) of the episode's users."""
        return {turn.interaction.user for turn in self.turns}

    @property
    def last_active(self) -> float:
        """Time at which the newest answer ended."""
        return max((turn.interaction.ended for turn in self.turns), default=0.0)

    @property
    def started(self) -> float:
        """Time at which the first request arrived."""
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
        """Put the complete answer in place of the partial one that was recorded when the client seemed to disconnect.
        Return False if the episode has no such partial answer."""
        for turn in self.turns:
            if turn.interaction.id == interaction.id and turn.interaction.finish == DISCONNECTED != interaction.finish:
                turn.seq, turn.interaction, turn.refusal = seq, interaction, None
                return True
        return False

    def holder(self, name: str) -> tuple[dict[str, FeedbackItem], str]:
        """Return the dictionary of the feedback on the target ``name``, and the API key that received the target's
        answer.

        The target is the turn with the canonical id ``name``, or the whole episode if no turn has it.
        """
        for turn in self.turns:
            if canonical_id(turn.interaction.id) == name:
                return turn.items, turn.interaction.key_id
        return self.items, self.asker

    def settle(self, job: OnlineJob, *, version: int, now: float) -> EpisodeOutcome[Trajectory] | None:
        """Return the outcome of the episode, or None while feedback, turns or a policy version are still awaited.

        If the episode timed out without a trajectory, facts that arrived later do not change the outcome. So a new
        leader, which reads all facts at once, gets the same outcome as the leader at the time of the timeout.
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

    def _outcome_before_late_facts(self, job: OnlineJob, now: float) -> EpisodeOutcome[Trajectory] | None:
        """If the outcome at the episode's timeout was to train nothing, and turns or feedback arrived later, return
        that outcome, extended to refuse the late turns. Otherwise return None."""
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
        behind = [turn for turn in self.turns if turn.interaction.ended >= late]
        return replace(outcome, refused=same_reason(behind, EPISODE_OVER) | outcome.refused)

    def _settle(self, job: OnlineJob, *, version: int, now: float) -> EpisodeOutcome[Trajectory] | None:
        is_closed = self._is_closed(job)
        is_over = is_closed or is_out_of_time(job, first=self.started, newest=self.last_active, now=now)
        if not (self.single or is_over):
            return None
        feedback_by_turn = [self._feedback_on(place, job) for place in range(len(self.turns))]
        rated = self._rated(feedback_by_turn, job)
        for turn in self.turns:
            if turn.refusal is None:  # facts alone decide this, so one computation is enough
                turn.refusal = refusal_of(turn.interaction, job)
        decisions = [
            admit(
                turn.interaction, feedback_by_turn[place], job, version=version, now=now,
                last=place == len(self.turns) - 1, closed=is_over, rated=rated[place], refusal=turn.refusal,
            )
            for place, turn in enumerate(self.turns)
        ]  # fmt: skip
        if any(decision.verdict == "wait" for decision in decisions):
            return None
        if job.online.unfinished == "mask" and not (self.single or is_closed):
            decisions = [_unfinished(decision) for decision in decisions]
        return self._outcome(job, feedback_by_turn, decisions)

    @property
    def tree(self) -> TurnTree:
        """Turn tree of the episode; cached until the turns change."""
        if len(self.turns) == 1:
            return SINGLE_TURN
        seqs = tuple(turn.seq for turn in self.turns)
        if self._tree[0] != seqs:
            found = (turn.interaction for turn in self.turns)
            self._tree = seqs, turn_tree([TurnTokens.of(one.prompt_ids, one.token_ids) for one in found])
        return self._tree[1]

    def _rated(self, feedback_by_turn: Sequence[Sequence[Feedback]], job: OnlineJob) -> list[bool]:
        """Return one flag per turn: True if its conversation, or the episode as a whole, has feedback."""
        if not any(feedback_by_turn):
            return [False] * len(self.turns)
        counted = [counted_feedback(items, job.online) for items in feedback_by_turn]
        whole = any(level == "episode" for on_turn in counted for _, level in on_turn)
        return self.tree.rated([bool(on_turn) for on_turn in counted], whole=whole)

    def _is_closed(self, job: OnlineJob) -> bool:
        """Return True if feedback ended the episode: an item is `final`, or every metric of level `episode` has an
        item."""
        found = [item.feedback for item in self._all_feedback()]
        if not found or any(feedback.final for feedback in found):
            return bool(found)
        judged = {name for name, metric in job.online.metrics.items() if metric.level == "episode"}
        return bool(judged) and judged <= {feedback.metric for feedback in found if feedback.weight > 0}

    def _all_feedback(self) -> list[FeedbackItem]:
        return [*self.items.values(), *(item for turn in self.turns for item in turn.items.values())]

    def _feedback_on(self, place: int, job: OnlineJob) -> list[Feedback]:
        """Return the items of feedback that count for the turn at ``place``.

        Feedback on the episode goes to the turn whose number it gives, or else to the last turn.
        """
        on_turn = [item.feedback for item in self.turns[place].items.values()]
        return on_turn + [
            item.feedback
            for item in self.items.values()
            if self._target(item.feedback, job) == place and item.feedback.metric
        ]

    def _target(self, feedback: Feedback, job: OnlineJob) -> int:
        """Return the position of the turn that feedback on the episode judges: the turn that the feedback gives by
        number, or else the last turn."""
        is_numbered = 0 <= feedback.turn < len(self.turns) and not _is_of_whole(feedback, job)
        return feedback.turn if is_numbered else len(self.turns) - 1

    def _outcome(
        self, job: OnlineJob, feedback_by_turn: Sequence[Sequence[Feedback]], decisions: list[Decision]
    ) -> EpisodeOutcome[Trajectory]:
        trial_sample = trial_sample_of(job, self.turns, decisions, _judging_keys(self._all_feedback(), job))
        if any(turn.refusal in (CANARY, NOT_COMPARED) for turn in self.turns):
            # No turn may learn from what followed it.
            return EpisodeOutcome([], same_reason(self.turns, CANARY), trial_sample)
        counts = [
            decision.verdict == "train" or bool(counted_feedback(items, job.online))
            for decision, items in zip(decisions, feedback_by_turn, strict=True)
        ]  # fmt: skip
        values = returns(self._rewards(job, feedback_by_turn, decisions), job.online.gamma, self.tree, counts)
        decisions = [_only_if_good(decision, value, job) for decision, value in zip(decisions, values, strict=True)]
        kinds = {
            place: TurnKind(one.objective, one.objective == "policy" and one.reason not in MASKED)
            for place, one in enumerate(decisions)
            if one.verdict == "train"
        }
        tokens = [(one.sampling.temperature, len(one.token_ids)) for one in (turn.interaction for turn in self.turns)]
        parts = form_trajectories(
            job, self.tree, kinds, values=values, turns=tokens, owners=lambda places: self._owners(places, job)
        )  # fmt: skip
        trained = {place for places, _ in parts for place in places}
        refused = {place: turn for place, turn in enumerate(self.turns) if place not in trained}
        trajectories = []
        for places, share in parts:
            feedback = {name: item for place in places for name, item in self.turns[place].items.items()}
            if places[-1] == max(trained):  # feedback on refused turns counts by credit
                feedback |= self.items | {name: item for turn in refused.values() for name, item in turn.items.items()}
            judges = _judging_keys(self._feedback_reaching(places[0], job), job)
            reason = _reason([decisions[place] for place in places], [values[place] for place in places], judges)
            turns, objective = tuple(self.turns[place] for place in places), kinds[places[0]].objective
            trajectories.append(Trajectory(turns, values[places[-1]], reason, feedback, judges, objective, share))
        reasons = {
            canonical_id(turn.interaction.id): OVER_SHARE if place in kinds else decisions[place].reason
            for place, turn in refused.items()
        }
        return EpisodeOutcome(trajectories, reasons, trial_sample)

    def _rewards(
        self, job: OnlineJob, feedback_by_turn: Sequence[Sequence[Feedback]], decisions: Sequence[Decision]
    ) -> list[float]:
        """Return the reward of each turn; the last turn of every branch also gets the reward of the whole episode."""
        rewards, whole = [decision.reward for decision in decisions], reward_of_whole(feedback_by_turn[-1], job)
        last = len(rewards) - 1
        for place in branch_ends(self.tree.parents) - {last}:  # the last turn has the episode's reward already
            if not is_invalid(self.turns[place].interaction, job):
                rewards[place] += whole
        return rewards

    def _owners(self, places: Sequence[int], job: OnlineJob) -> Owners:
        """Return the owners of the trajectory that the turns at ``places`` form."""
        judges = _judging_keys(self._feedback_reaching(places[0], job), job)
        return owners_of_turns([self.turns[place] for place in places], judges)

    def _feedback_reaching(self, place: int, job: OnlineJob) -> list[FeedbackItem]:
        """Return all feedback that affects the return of the turn at ``place``.

        This is feedback on the turn, on its descendants, on the whole episode, or on the turn of its conversation
        whose number the feedback gives.
        """
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
    """Return the API keys whose items of feedback count for a reward."""
    counting = (one.feedback for one in items if level_of(one.feedback, job.online) and one.feedback.weight > 0)
    return tuple(sorted({item.key_id for item in counting}))


def _reason(decisions: Sequence[Decision], values: Sequence[float], judges: Collection[str]) -> str:
    """Return the reason that the ledger records with a trajectory: where its reward came from, or why its tokens are
    masked.

    ``decisions`` and ``values`` (discounted returns) have one entry per turn.

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
    """Change the decision on a turn whose episode no client has ended: mask the turn if it was admitted for the policy
    loss, and reject it if it was admitted for imitation.

    The decision on a turn that is not trained stays as it is.
    """
    if decision.verdict != "train":
        return decision
    if decision.objective == "policy":
        return replace(decision, reason=UNFINISHED)
    return replace(decision, verdict="reject", reason=decision.denied, compared=True)  # as in the arm on trial


def _only_if_good(decision: Decision, value: float, job: OnlineJob) -> Decision:
    """Change a decision that admits a turn for imitation into a rejection if ``value``, the discounted return of the
    turn, is too low. Return any other decision unchanged."""
    off_policy = job.online.off_policy
    if decision.objective == "policy" or off_policy is None or off_policy.supervised is None:
        return decision
    if value >= off_policy.supervised.min_reward:
        return decision
    return Decision("reject", decision.denied, decision.reward)


@dataclass(slots=True)
class PostedEpisode:
    """Undecided turns of a posted episode: another system served the episode, and a client posted its turns as
    feedback.

    ``turns`` has the turns by the ids of their feedback items. ``key`` consists of the API key and the name of the
    episode.
    """

    key: str
    turns: dict[str, PostedTurn] = field(default_factory=dict)
    due: float = math.inf
    """Time at which the episode times out while a turn may still arrive; infinity otherwise."""
    _credit: _EpisodeCredit | None = None

    @property
    def ordered(self) -> list[PostedTurn]:
        """Turns in the order of the episode."""
        return sorted(self.turns.values(), key=lambda turn: turn.order)

    def is_over(self, job: OnlineJob, now: float) -> bool:
        """Return True if no further turn is awaited; otherwise set ``due`` to the time at which the wait ends."""
        arrivals = Arrivals()
        for turn in self.turns.values():
            arrivals.add(turn.item.feedback)
        is_over = arrivals.is_over(job, now)
        self.due = math.inf if is_over else arrivals.due(job)
        return is_over

    def late_turns(self, job: OnlineJob) -> dict[str, str]:
        """Return the turns that arrived after the end of the episode, or that exceed the maximum number of turns, each
        with the reason.

        The result depends only on the stream, so a leader that reads all turns at once gets the same result. Items of
        one message arrived together. A revised turn arrived with its first revision.
        """
        items = sorted(
            (turn.item for turn in self.turns.values()), key=lambda one: (not one.feedback.revision, one.seq)
        )
        arrivals, found = Arrivals(), {one.feedback.id: TOO_MANY_TURNS for one in items[MAX_TURNS:]}
        came = sorted(items[:MAX_TURNS], key=lambda one: one.seq)
        for _, message in groupby(came, key=lambda one: one.seq):
            items_of_message = [one.feedback for one in message]
            behind = [
                one
                for one in items_of_message
                if not one.revision and arrivals.numbers and arrivals.is_over(job, one.received)
            ]
            found |= {one.id: EPISODE_OVER for one in behind}
            for one in items_of_message:
                if one.id not in found:
                    arrivals.add(one)
        return found

    def credit(self, job: OnlineJob) -> _EpisodeCredit:
        """Return the turn tree of the episode and the returns of its turns; cached until the turns change."""
        turns = self.ordered
        if self._credit is None or self._credit.orders != [turn.order for turn in turns]:
            self._credit = _credit_of(turns, job)
        return self._credit

    def settle(self, job: OnlineJob, policy: PolicyState) -> EpisodeOutcome[OffPolicyExample] | None:
        """Return the outcome of an ended episode, or None while the leader waits for a policy version.

        Turns that are not trained count by credit; they are refused only if no turn is trained.
        """
        turns = self.ordered
        key_id = turns[0].item.feedback.key_id
        decisions = [admit_posted_for(turn.facts, key_id, job, policy, math.inf) for turn in turns]
        if any(one.verdict == "wait" for one in decisions):
            return None
        if any(one.verdict == "train" for one in decisions):  # otherwise no reward matters, and the tree is not needed
            credit = self.credit(job)
            decisions = [
                admit_posted_for(turn.facts, key_id, job, policy, value if rated else None)
                for turn, value, rated in zip(turns, credit.values, credit.rated, strict=True)
            ]
        taken = {place: one for place, one in enumerate(decisions) if one.verdict == "train"}
        if not taken:
            return EpisodeOutcome([], {turn.name: one.reason for turn, one in zip(turns, decisions, strict=True)})
        parts = self.trajectories(
            job, taken, lambda places: Owners((key_id,), (key_id,), (turns[places[0]].item.feedback.user,))
        )
        trained = {place for places, _ in parts for place in places}
        untrained = tuple(turn.item for place, turn in enumerate(turns) if place not in trained)
        examples = [
            posted_example(
                [(turns[place].item, turns[place].facts) for place in places], taken[places[0]], policy,
                episode=self.key, share=share, untrained=untrained if places[-1] == max(trained) else (),
            )
            for places, share in parts
        ]  # fmt: skip
        return EpisodeOutcome(examples, {})

    def trajectories(
        self, job: OnlineJob, taken: Mapping[int, Decision], owners: Callable[[Sequence[int]], Owners] | None = None
    ) -> list[tuple[list[int], float]]:
        """Form trajectories from the turns at the positions ``taken``; return ``(positions, weight)`` of each
        trajectory."""
        turns, credit = self.ordered, self.credit(job)
        kinds = {}
        for place, one in taken.items():
            apart = -1 if one.reason in AS_SAMPLED else place
            group = one.reason, turns[place].item.feedback.user, apart
            kinds[place] = TurnKind(one.objective, one.objective == "policy", group)
        tokens = [(turn.facts.temperature, turn.facts.num_tokens) for turn in turns]
        return form_trajectories(job, credit.tree, kinds, values=credit.values, turns=tokens, owners=owners)


@dataclass(frozen=True, slots=True)
class _EpisodeCredit:
    """Tree and returns of a posted episode; ``rated`` is True for each turn whose return includes feedback."""

    orders: list[tuple[int, float, int]]
    """Sort keys (``PostedTurn.order``) of the turns from which tree and returns were computed."""
    tree: TurnTree
    values: list[float]
    rated: list[bool]


def _credit_of(turns: Sequence[PostedTurn], job: OnlineJob) -> _EpisodeCredit:
    """Compute the returns of a posted episode; the reward of the whole episode goes to the last turn of each branch."""
    tree, of_turn = turn_tree([turn.tokens for turn in turns]), job.online.of_level("interaction")
    of_whole = {name: metric for name, metric in job.online.of_level("episode").items() if name not in of_turn}
    rewards_of_whole = {name: value for turn in turns for name, value in turn.facts.rewards.items() if name in of_whole}
    rewards = [reward_of_posted(turn.facts.rewards, of_turn) for turn in turns]
    whole = reward_of_posted(rewards_of_whole, of_whole)
    for place in branch_ends(tree.parents):
        rewards[place] += whole
    has_feedback = [has_reward(turn.facts, job.online) for turn in turns]
    usable = [not refusal_of_posted(turn.facts, job) for turn in turns]
    counts = [one or other for one, other in zip(has_feedback, usable, strict=True)]
    values = returns(rewards, job.online.gamma, tree, counts)
    return _EpisodeCredit(
        [turn.order for turn in turns], tree, values, tree.rated(has_feedback, whole=bool(rewards_of_whole))
    )
