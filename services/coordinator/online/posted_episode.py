"""Decides how posted interactions are used: answers that another system served, alone or as turns of an episode. Pure.

==========================================  =============================================================
the client posts tokens with                use
==========================================  =============================================================
log-probs, a version within the lag bound   policy loss (`posted`); a worker recomputes a sample of them
no log-probs, a version still held          policy loss, log-probs computed under that version (`rescored`):
                                            the newest one, or one of `held_versions` before it
neither                                     policy loss as if the newest policy had sampled them
                                            (`assumed`), if the job allows it
any of these, if that is not possible       imitation, if the reward is high enough
text only                                   imitation, if the reward is high enough
==========================================  =============================================================
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import msgspec

from penstock.services.coordinator.online.admission import HIGHEST_LOGPROB, reward_of_value
from penstock.services.coordinator.online.fairness import Owners, within_bounds
from penstock.services.coordinator.online.turns import (
    FeedbackItem,
    TurnTokens,
    TurnTree,
    join_turns,
    returns,
    trajectory_weights,
    turn_tree,
)
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import REWARD, MetricConfig, OnlineConfig
from penstock.shared.protocol.live.interaction import MAX_TURNS, Feedback
from penstock.shared.protocol.objective import Objective

__all__ = [
    "EPISODE_OVER",
    "TOO_MANY_TURNS",
    "PolicyState",
    "PostedEpisode",
    "PostedFacts",
    "PostedTrajectory",
    "PostedTurn",
    "PostedUse",
    "can_learn_from",
    "facts_of",
    "has_reward",
    "posted_episode_key",
    "refusal_of_tokens",
    "reward_of_posted",
    "tokens_of",
    "use_of",
    "use_with_reward",
]

EVERY_KEY = "*"
NOT_TRAINED_YET = "not_trained"
"""Reason to wait for the version of a sealed batch, which engines may have shortly before the ledger."""
EPISODE_OVER, TOO_MANY_TURNS = "episode_over", "too_many_turns"
UNNUMBERED = 1 << 62
"""Sort key that puts turns without a number last."""
AS_SAMPLED = frozenset({"posted", "rescored"})
"""Rules under which each turn has its own log-probs, so that several turns can form one trajectory."""


class PostedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a posted interaction, without its tokens, that decide how it is used."""

    version: int | None
    num_prompt: int
    num_tokens: int
    has_logprobs: bool
    flaw: str
    """Defect of the log-probs, or ''."""
    plain: bool
    """True if sampling was neither greedy nor truncated."""
    temperature: float
    rewards: dict[str, bool | float]
    group: str = ""
    """Name of the task; interactions with the same name and API key answer the same task."""


@dataclass(frozen=True, slots=True)
class PostedUse:
    """How a posted interaction is used: `reject` for ``reason``, `wait` for a fact, or `take` for ``objective``.

    With `take`, ``reason`` is the rule of the policy loss, or, for imitation, why the policy loss may not use it.
    """

    verdict: Literal["take", "reject", "wait"]
    reason: str
    objective: Objective = "policy"
    reward: float = 0.0


def facts_of(item: Feedback) -> PostedFacts:
    """Extract the facts from a posted body."""
    body = item.body
    tokens, logprobs = body.get("token_ids") or [], body.get("logprobs") or []
    sampling = body.get("sampling") or {}
    temperature = float(sampling.get("temperature", 1.0))
    plain = temperature > 0 and sampling.get("top_p", 1.0) == 1.0 and not sampling.get("top_k", 0)
    rewards = {**body.get("rewards", {})}
    if body.get("reward") is not None:
        rewards[REWARD] = body["reward"]
    return PostedFacts(
        version=body.get("policy_version"), num_prompt=len(body.get("prompt_token_ids") or []), num_tokens=len(tokens),
        has_logprobs=bool(logprobs), flaw=_flaw(tokens, logprobs),
        plain=plain, temperature=temperature,
        rewards={name: value if isinstance(value, bool) else float(value) for name, value in rewards.items()},
        group=f"{item.key_id} {body['group_id']}" if body.get("group_id") else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State of the policy when a posted interaction is decided.

    Attributes:
        version: version from which the next update starts; lags count from it.
        newest: newest version that exists; sealed batches not trained yet lie between the two.
        temperature: temperature at which the job samples.
        distrusted: API keys whose log-probs were wrong.
    """

    version: int
    newest: int
    temperature: float
    distrusted: Collection[str] = ()


def use_of(facts: PostedFacts, key_id: str, job: OnlineJob, now: PolicyState) -> PostedUse:
    """Decide by the rewards posted with the interaction; ``key_id`` is the API key that posted it."""
    metrics = job.online.of_level("interaction") | job.online.of_level("episode")
    is_judged = has_reward(facts, job.online)
    return use_with_reward(facts, key_id, job, now, reward_of_posted(facts.rewards, metrics) if is_judged else None)


def can_learn_from(key_id: str, job: OnlineJob) -> bool:
    """Return True if the job may train on posts of an API key."""
    off_policy = job.online.off_policy
    return _is_trusted(key_id, job) or (off_policy is not None and off_policy.supervised is not None)


def _is_trusted(key_id: str, job: OnlineJob) -> bool:
    return not {key_id, EVERY_KEY}.isdisjoint(job.online.posted.trusted_keys)


def use_with_reward(
    facts: PostedFacts, key_id: str, job: OnlineJob, now: PolicyState, reward: float | None
) -> PostedUse:
    """Decide by a given reward; None is an interaction without feedback."""
    refusal = refusal_of_tokens(facts, job)
    if refusal:
        return PostedUse("reject", refusal)
    rule, denied = _rule(facts, key_id, job, now)
    if denied == NOT_TRAINED_YET:
        return PostedUse("wait", denied)
    if rule:
        return PostedUse("reject", "no_reward") if reward is None else PostedUse("take", rule, "policy", reward)
    off_policy = job.online.off_policy
    supervised = off_policy.supervised if off_policy is not None else None
    if supervised is None or reward is None or reward < supervised.min_reward:
        return PostedUse("reject", denied)
    return PostedUse("take", denied, "supervised", reward)


def _rule(facts: PostedFacts, key_id: str, job: OnlineJob, now: PolicyState) -> tuple[str, str]:
    """Return ``(rule of the policy loss, '')``, or ``('', reason against it)``."""
    posted, known = job.online.posted, facts.version is not None
    checks = {
        "text_only": not facts.num_tokens,
        "source_distrusted": key_id in now.distrusted,
        "source_not_trusted": not _is_trusted(key_id, job),
        "sampling_not_replayable": not facts.plain or facts.temperature != now.temperature,
        "unknown_version": facts.version is not None and facts.version > now.version,
        "stale": facts.has_logprobs and known and _lag(facts, now) > job.train.max_lag,
    }
    denied = next((reason for reason, found in checks.items() if found), "")
    if denied:
        return "", denied
    if facts.version is not None and facts.version > now.newest:
        return "", NOT_TRAINED_YET
    if facts.has_logprobs and known:
        return "posted", ""
    if facts.version is not None and facts.temperature == 1.0:  # workers score without a temperature
        held = facts.version >= now.newest - posted.held_versions
        if held:
            return ("rescored", "") if _lag(facts, now) <= job.train.max_lag else ("", "stale")
    if posted.assume_on_policy:
        return "assumed", ""
    return "", "version_not_held" if known else "behaviour_unknown"


def _lag(facts: PostedFacts, now: PolicyState) -> int:
    """Return the number of versions between the sampler and the start of the next update."""
    return 0 if facts.version is None else now.version - facts.version


def _flaw(tokens: Collection[int], logprobs: Collection[float]) -> str:
    if logprobs and len(logprobs) != len(tokens):
        return "lengths_differ"
    return "" if all(math.isfinite(value) and value <= HIGHEST_LOGPROB for value in logprobs) else "not_finite"


def refusal_of_tokens(facts: PostedFacts, job: OnlineJob) -> str:
    """Return why a post cannot be trained on, whatever its reward is, or ''."""
    if facts.flaw:
        return facts.flaw
    if facts.num_tokens and not facts.num_prompt:
        return "no_tokens"
    if facts.num_prompt > job.data.prompt.max_tokens:
        return "prompt_too_long"
    return "completion_too_long" if facts.num_tokens > job.sampling.max_new_tokens else ""


def has_reward(facts: PostedFacts, online: OnlineConfig) -> bool:
    """Return True if the post has a reward that the job knows."""
    return any(online.metric(name) is not None for name in facts.rewards)


def reward_of_posted(rewards: Mapping[str, bool | float], metrics: Mapping[str, MetricConfig]) -> float:
    """Sum the clipped values of these metrics; a missing one takes its default."""
    return sum(reward_of_value(rewards.get(name, metric.default_value), metric) for name, metric in metrics.items())


def posted_episode_key(item: Feedback, job: OnlineJob) -> str:
    """Return the key of a posted interaction's episode, scoped to its API key; '' if it counts alone."""
    if item.kind != "interaction" or not item.episode or not job.online.has_credit:
        return ""
    return f"{item.key_id} {item.episode}"


def tokens_of(item: Feedback, job: OnlineJob) -> TurnTokens:
    """Return the tokens that place a posted interaction in its episode's tree, or none if nothing depends on them.

    Nothing depends on them for posts of text and for keys that the job does not train on: tokens stay in memory until
    the episode is over. Tokens beyond the longest trainable prompt and answer are cut, because no trained turn extends
    them.
    """
    tokens = item.body.get("token_ids") or []
    if not tokens or not can_learn_from(item.key_id, job):
        return TurnTokens.of([], [])
    most = job.data.prompt.max_tokens + job.sampling.max_new_tokens
    prompt = (item.body.get("prompt_token_ids") or [])[:most]
    return TurnTokens.of(prompt, tokens[: most - len(prompt)])


@dataclass(frozen=True, slots=True)
class PostedTurn:
    """One posted interaction; its item has no body."""

    item: FeedbackItem
    facts: PostedFacts
    tokens: TurnTokens

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: turns with a number first, then turns without one by arrival."""
        feedback = self.item.feedback
        return feedback.turn if feedback.turn >= 0 else UNNUMBERED, feedback.received, self.item.seq


@dataclass(frozen=True, slots=True)
class PostedTrajectory:
    """Turns that are trained as one sequence; ``untrained`` are turns that only count by credit."""

    turns: tuple[PostedTurn, ...]
    use: PostedUse
    share: float
    untrained: tuple[PostedTurn, ...] = ()


@dataclass(frozen=True, slots=True)
class _EpisodeCredit:
    """Tree and returns of an episode."""

    tree: TurnTree
    values: list[float]
    rated: list[bool]
    """True for a turn whose conversation, or the whole episode, has a reward."""


@dataclass(slots=True)
class _Arrivals:
    """Turns of an episode that have arrived."""

    numbers: set[int] = field(default_factory=set)
    next_number: int = 0
    """All turns below this number have arrived."""
    last: int | None = None
    """Number of the last turn, once a client has marked one as final."""
    first: float = math.inf
    newest: float = -math.inf

    def add(self, turn: Feedback) -> None:
        """Add a turn."""
        self.numbers.add(turn.turn)
        while self.next_number in self.numbers:
            self.next_number += 1
        if turn.final:
            self.last = turn.turn if self.last is None else max(self.last, turn.turn)
        self.first, self.newest = min(self.first, turn.received), max(self.newest, turn.received)

    def is_over(self, job: OnlineJob, now: float) -> bool:
        """Return True if the final turn and all before it have arrived, or if the episode has timed out."""
        if self.last is not None and self.next_number >= self.last:
            return True
        return now - self.newest >= job.online.idle_ttl_s or now - self.first >= job.online.max_age_s

    def due(self, job: OnlineJob) -> float:
        """Return the time at which the episode times out (Unix seconds)."""
        return min(self.newest + job.online.idle_ttl_s, self.first + job.online.max_age_s)


@dataclass(slots=True)
class PostedEpisode:
    """Undecided turns by the ids of their items."""

    turns: dict[str, PostedTurn] = field(default_factory=dict)
    due: float | None = None
    """Time at which the episode times out, while a turn may still arrive."""
    _credit: tuple[tuple[tuple[int, float, int], ...], _EpisodeCredit | None] = ((), None)

    @property
    def ordered(self) -> list[PostedTurn]:
        """Turns in the order of the episode."""
        return sorted(self.turns.values(), key=lambda turn: turn.order)

    def is_over(self, job: OnlineJob, now: float) -> bool:
        """Return True if no further turn is awaited; otherwise set ``due`` to the time at which the wait ends."""
        arrivals = _Arrivals()
        for turn in self.turns.values():
            arrivals.add(turn.item.feedback)
        is_over = arrivals.is_over(job, now)
        self.due = None if is_over else arrivals.due(job)
        return is_over

    def late_turns(self, job: OnlineJob) -> dict[str, str]:
        """Return the turns that arrived after the episode was over, or above the limit, each with its reason.

        The result depends only on the stream, so a leader that reads all turns at once gets the same one. Items of one
        message arrived together. A revised turn arrived with its first revision.
        """
        items = sorted(
            (turn.item for turn in self.turns.values()), key=lambda one: (not one.feedback.revision, one.seq)
        )
        arrivals, found = _Arrivals(), {one.feedback.id: TOO_MANY_TURNS for one in items[MAX_TURNS:]}
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
        """Return the tree and the returns of its turns; cached until the turns change."""
        turns = self.ordered
        orders = tuple(turn.order for turn in turns)
        if self._credit[1] is None or self._credit[0] != orders:
            self._credit = orders, _credit_of(turns, job)
        assert self._credit[1] is not None
        return self._credit[1]

    def settle(self, job: OnlineJob, now: PolicyState) -> list[PostedTrajectory] | dict[str, str] | None:
        """Return the trajectories to train; reasons by item if there are none; None while a version is awaited."""
        turns = self.ordered
        key = turns[0].item.feedback.key_id
        best = [use_with_reward(turn.facts, key, job, now, math.inf) for turn in turns]
        if any(use.verdict == "wait" for use in best):
            return None
        if all(use.verdict == "reject" for use in best):  # no reward can change this, so the tree is not needed
            return {turn.item.feedback.id: use.reason for turn, use in zip(turns, best, strict=True)}
        credit = self.credit(job)
        uses = [
            use_with_reward(turn.facts, key, job, now, value if rated else None)
            for turn, value, rated in zip(turns, credit.values, credit.rated, strict=True)
        ]
        good = {place: use for place, use in enumerate(uses) if use.verdict == "take"}
        if not good:
            return {turn.item.feedback.id: use.reason for turn, use in zip(turns, uses, strict=True)}
        parts = within_bounds(
            job, good,
            lambda left: self.parts(job, {place: (good[place].objective, good[place].reason) for place in left}),
            lambda places: (Owners((key,), (key,), (turns[places[0]].item.feedback.user,)), good[places[0]].objective),
        )  # fmt: skip
        trained = {place for places in parts for place in places}
        shares = self.shares(job, [places for places in parts if good[places[0]].objective == "policy"])
        untrained = tuple(turn for place, turn in enumerate(turns) if place not in trained)
        return [
            PostedTrajectory(
                tuple(turns[place] for place in places), good[places[0]], shares.get(places[0], 1.0),
                untrained if places[-1] == max(trained) else (),
            )
            for places in parts
        ]  # fmt: skip

    def parts(self, job: OnlineJob, rules: Mapping[int, tuple[Objective, str]]) -> list[list[int]]:
        """Return the places of each trajectory's turns; ``rules`` has the loss and the rule of each trained turn."""
        turns, credit = self.ordered, self.credit(job)
        kinds = {
            place: (*rule, turns[place].item.feedback.user, -1 if rule[1] in AS_SAMPLED else place)
            for place, rule in rules.items()
        }
        return join_turns(credit.tree, kinds, credit.values, [turn.facts.temperature for turn in turns])

    def shares(self, job: OnlineJob, own: Sequence[Sequence[int]]) -> dict[int, float]:
        """Return the weights of the policy-loss trajectories by their first turn."""
        lengths = [turn.facts.num_tokens for turn in self.ordered]
        return trajectory_weights(job, self.credit(job).tree, own, lengths)


def _credit_of(turns: Sequence[PostedTurn], job: OnlineJob) -> _EpisodeCredit:
    """Compute returns along the branches; the reward of the whole episode counts at the end of each branch."""
    tree, of_turn = turn_tree([turn.tokens for turn in turns]), job.online.of_level("interaction")
    of_whole = {name: metric for name, metric in job.online.of_level("episode").items() if name not in of_turn}
    said_of_whole = {name: value for turn in turns for name, value in turn.facts.rewards.items() if name in of_whole}
    rewards = [reward_of_posted(turn.facts.rewards, of_turn) for turn in turns]
    whole = reward_of_posted(said_of_whole, of_whole)
    for place in set(range(len(turns))) - set(tree.parents):
        rewards[place] += whole
    spoken = [has_reward(turn.facts, job.online) for turn in turns]
    usable = [not refusal_of_tokens(turn.facts, job) for turn in turns]
    counts = [one or other for one, other in zip(spoken, usable, strict=True)]
    rated = {root for root, one in zip(tree.roots, spoken, strict=True) if one}
    values = returns(rewards, job.online.gamma, tree, counts)
    return _EpisodeCredit(tree, values, [bool(said_of_whole) or root in rated for root in tree.roots])
