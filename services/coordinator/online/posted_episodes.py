"""Episodes that were not served here: their turns in order, with what later ones earned, once all are there. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from penstock.services.coordinator.online.bounds import within_bounds
from penstock.services.coordinator.online.branches import Said, Tree, tree_of
from penstock.services.coordinator.online.credit import Item, joined, returns, weights_of
from penstock.services.coordinator.online.posted import (
    Facts,
    Present,
    Use,
    can_be_used,
    is_judged,
    refusal_of_tokens,
    reward_of_posted,
    use_for,
)
from penstock.services.coordinator.online.shares import Owners
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.interaction import MAX_TURNS, Feedback
from penstock.shared.protocol.objective import Objective

__all__ = ["EPISODE_OVER", "TOO_MANY_TURNS", "PostedEpisode", "PostedPart", "PostedTurn", "episode_of_item", "said_of"]

EPISODE_OVER, TOO_MANY_TURNS = "episode_over", "too_many_turns"
UNNUMBERED = 1 << 62
"""Behind every number."""
AS_SAMPLED = frozenset({"posted", "rescored"})
"""Rules by which each turn has log-probs of its own: several can be one trajectory."""


def episode_of_item(item: Feedback, job: OnlineJob) -> str:
    """The episode of a posted interaction, one of its key; '' where it is none, or each turn counts by itself."""
    if item.kind != "interaction" or not item.episode or not job.online.has_credit:
        return ""
    return f"{item.key_id} {item.episode}"


def said_of(item: Feedback, job: OnlineJob) -> Said:
    """The tokens of a posted interaction by which its place in the tree is found; none where nothing depends on it.

    That is where it was posted as text, and where nothing is learnt from its key: tokens are held until the episode is
    over, whoever posted them. What is behind the longest prompt and answer that may be trained is left out: no turn
    that is trained goes on from there.
    """
    tokens = item.body.get("token_ids") or []
    if not tokens or not can_be_used(item.key_id, job):
        return Said.of([], [])
    most = job.data.prompt.max_tokens + job.sampling.max_new_tokens
    prompt = (item.body.get("prompt_token_ids") or [])[:most]
    return Said.of(prompt, tokens[: most - len(prompt)])


@dataclass(frozen=True, slots=True)
class PostedTurn:
    """One posted interaction; its item is without its body."""

    item: Item
    facts: Facts
    said: Said

    @property
    def order(self) -> tuple[int, float, int]:
        """By number; those without one behind the others, as they came."""
        feedback = self.item.feedback
        return feedback.turn if feedback.turn >= 0 else UNNUMBERED, feedback.received, self.item.seq


@dataclass(frozen=True, slots=True)
class PostedPart:
    """Turns that are trained as one. ``riders``: turns that are not trained, and count by credit."""

    turns: tuple[PostedTurn, ...]
    use: Use
    share: float
    riders: tuple[PostedTurn, ...] = ()


@dataclass(frozen=True, slots=True)
class _Credit:
    """What follows from the turns alone."""

    tree: Tree
    values: list[float]
    rated: list[bool]
    """Whether somebody said something of the conversation that a turn is of, or of the whole."""


@dataclass(slots=True)
class _Course:
    """What came of an episode so far."""

    numbers: set[int] = field(default_factory=set)
    complete: int = 0
    """All turns below this number are there."""
    last: int | None = None
    """The number of the last turn, once somebody said which it is."""
    first: float = math.inf
    newest: float = -math.inf

    def hear(self, turn: Feedback) -> None:
        """A turn came."""
        self.numbers.add(turn.turn)
        while self.complete in self.numbers:
            self.complete += 1
        if turn.final:
            self.last = turn.turn if self.last is None else max(self.last, turn.turn)
        self.first, self.newest = min(self.first, turn.received), max(self.newest, turn.received)

    def is_over(self, job: OnlineJob, now: float) -> bool:
        """Whether one turn said so and all before it are there, or no other one came for too long."""
        if self.last is not None and self.complete >= self.last:
            return True
        return now - self.newest >= job.online.idle_ttl_s or now - self.first >= job.online.max_age_s

    def due(self, job: OnlineJob) -> float:
        """When it is over where nothing more comes (Unix seconds)."""
        return min(self.newest + job.online.idle_ttl_s, self.first + job.online.max_age_s)


@dataclass(slots=True)
class PostedEpisode:
    """Turns that are not decided yet, by the ids of their items."""

    turns: dict[str, PostedTurn] = field(default_factory=dict)
    due: float | None = None
    """While a turn may come: when time alone ends it, as far as somebody looked."""
    _credit: tuple[tuple[tuple[int, float, int], ...], _Credit | None] = ((), None)

    @property
    def ordered(self) -> list[PostedTurn]:
        """In the order of the episode, however late they came."""
        return sorted(self.turns.values(), key=lambda turn: turn.order)

    def is_over(self, job: OnlineJob, now: float) -> bool:
        """True if no further turn is waited for; ``due`` says until when one is."""
        course = _Course()
        for turn in self.turns.values():
            course.hear(turn.item.feedback)
        is_over = course.is_over(job, now)
        self.due = None if is_over else course.due(job)
        return is_over

    def late(self, job: OnlineJob) -> dict[str, str]:
        """Turns that came when it was over, or had as many as one may have, and which of these it is.

        It follows from the stream: a leader that reads all of them at once finds the same. What is in one message came
        at once. A turn that is revised was there before.
        """
        items = sorted(
            (turn.item for turn in self.turns.values()), key=lambda one: (not one.feedback.revision, one.seq)
        )
        course, found = _Course(), {one.feedback.id: TOO_MANY_TURNS for one in items[MAX_TURNS:]}
        came = sorted(items[:MAX_TURNS], key=lambda one: one.seq)
        for _, message in groupby(came, key=lambda one: one.seq):
            said = [one.feedback for one in message]
            behind = [one for one in said if not one.revision and course.numbers and course.is_over(job, one.received)]
            found |= {one.id: EPISODE_OVER for one in behind}
            for one in said:
                if one.id not in found:
                    course.hear(one)
        return found

    def credit(self, job: OnlineJob) -> _Credit:
        """Which turn goes on from which and what each is worth: looked for once, however often it is looked at."""
        turns = self.ordered
        orders = tuple(turn.order for turn in turns)
        if self._credit[1] is None or self._credit[0] != orders:
            self._credit = orders, _credit_of(turns, job)
        assert self._credit[1] is not None
        return self._credit[1]

    def settle(self, job: OnlineJob, now: Present) -> list[PostedPart] | dict[str, str] | None:
        """What is trained of it; why not, by item, where nothing is; None while a version is waited for."""
        turns = self.ordered
        key = turns[0].item.feedback.key_id
        best = [use_for(turn.facts, key, job, now, math.inf) for turn in turns]
        if any(use.verdict == "wait" for use in best):
            return None
        if all(use.verdict == "reject" for use in best):  # whatever they earned: their tree decides nothing
            return {turn.item.feedback.id: use.reason for turn, use in zip(turns, best, strict=True)}
        credit = self.credit(job)
        uses = [
            use_for(turn.facts, key, job, now, value if rated else None)
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
        riders = tuple(turn for place, turn in enumerate(turns) if place not in trained)
        return [
            PostedPart(
                tuple(turns[place] for place in places), good[places[0]], shares.get(places[0], 1.0),
                riders if places[-1] == max(trained) else (),
            )
            for places in parts
        ]  # fmt: skip

    def parts(self, job: OnlineJob, rules: Mapping[int, tuple[Objective, str]]) -> list[list[int]]:
        """Places of turns that make one trajectory each; ``rules``: loss and rule of those that are trained."""
        turns, credit = self.ordered, self.credit(job)
        kinds = {
            place: (*rule, turns[place].item.feedback.user, -1 if rule[1] in AS_SAMPLED else place)
            for place, rule in rules.items()
        }
        return joined(credit.tree, kinds, credit.values, [turn.facts.temperature for turn in turns])

    def shares(self, job: OnlineJob, own: Sequence[Sequence[int]]) -> dict[int, float]:
        """How much the trajectories for the policy loss weigh, by their first turn."""
        lengths = [turn.facts.num_tokens for turn in self.ordered]
        return weights_of(job, self.credit(job).tree, own, lengths)


def _credit_of(turns: Sequence[PostedTurn], job: OnlineJob) -> _Credit:
    """Rewards of turns come back along the branches; what was said of the whole, last, to the end of each of them."""
    tree, of_turn = tree_of([turn.said for turn in turns]), job.online.of_level("interaction")
    of_whole = {name: metric for name, metric in job.online.of_level("episode").items() if name not in of_turn}
    said_of_whole = {name: value for turn in turns for name, value in turn.facts.rewards.items() if name in of_whole}
    rewards = [reward_of_posted(turn.facts.rewards, of_turn) for turn in turns]
    whole = reward_of_posted(said_of_whole, of_whole)
    for place in set(range(len(turns))) - set(tree.parents):
        rewards[place] += whole
    spoken = [is_judged(turn.facts, job.online) for turn in turns]
    usable = [not refusal_of_tokens(turn.facts, job) for turn in turns]
    counts = [one or other for one, other in zip(spoken, usable, strict=True)]
    rated = {root for root, one in zip(tree.roots, spoken, strict=True) if one}
    values = returns(rewards, job.online.gamma, tree, counts)
    return _Credit(tree, values, [bool(said_of_whole) or root in rated for root in tree.roots])
