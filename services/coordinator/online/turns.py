"""Defines served and posted turns, trajectories, and the times at which the facts of an episode arrived. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from penstock.services.coordinator.online.admission import PostedFacts, arrival_order, can_learn_from
from penstock.services.coordinator.online.credit import TurnTokens
from penstock.services.coordinator.online.fairness import Owners
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.live.interaction import Feedback, Interaction, bare_id
from penstock.shared.protocol.objective import Objective

__all__ = [
    "Arrivals",
    "FeedbackItem",
    "Holder",
    "PostedTurn",
    "Trajectory",
    "Turn",
    "canonical_id",
    "episode_key",
    "feedback_before",
    "first_late_time",
    "is_out_of_time",
    "owners_of_turns",
    "tokens_of",
    "turns_before",
]

MAX_SEQ = 1 << 62
"""Number that is higher than every stream sequence number."""
UNNUMBERED = 1 << 62
"""Sort key that puts turns without a number last."""
DISCONNECTED = "client_disconnected"
"""Finish reason of an answer whose client appeared to disconnect."""


def canonical_id(text: str) -> str:
    """Return an id without its prefix, and any other text unchanged."""
    return bare_id(text) or text


def episode_key(interaction: Interaction) -> str:
    """Return the key of an interaction's episode. A name that an agent chose is scoped to its API key, because
    other keys may use the same name."""
    return bare_id(interaction.episode) or f"{interaction.key_id} {interaction.episode}"


class FeedbackItem(msgspec.Struct, frozen=True, gc=False):
    """One item of feedback and the stream sequence number of its message in FEEDBACK.

    The garbage collector skips items (``gc=False``), which are never part of a reference cycle: with a million items, a
    full collection would stop the leader for seconds.
    """

    seq: int
    feedback: Feedback

    @property
    def target(self) -> str:
        """Interaction or episode that the feedback is about; '' if it names none."""
        return self.feedback.inference or self.feedback.episode

    def is_copied_in(self, seq: int, feedback: Feedback) -> bool:
        """Return True if ``feedback`` is a copy of this item in a later message, at ``seq``.

        When a user's data is deleted from a message, the remaining items are stored again as a new message.
        """
        own = self.feedback
        same = (own.revision, own.key_id, own.received) == (feedback.revision, feedback.key_id, feedback.received)
        is_value = own.value in (None, feedback.value)  # the body of an off-policy example stays in the stream
        return seq > self.seq and same and is_value

    def is_revised_by(self, feedback: Feedback) -> bool:
        """Return True if ``feedback`` is a newer revision by the same API key: no other key may revise an item."""
        return feedback.revision > self.feedback.revision and feedback.key_id == self.feedback.key_id


class Holder(msgspec.Struct, frozen=True, gc=False):
    """The undecided feedback on one turn of an episode, or on the episode as a whole: ``items``, by id of the item.
    ``key`` identifies the episode."""

    key: str
    items: dict[str, FeedbackItem]


@dataclass(slots=True)
class Turn:
    """One interaction, the stream sequence number of its message, and the feedback items on it by their ids.

    ``refusal`` is the reason why the turn is never trained, or ''; None until it is computed.
    """

    seq: int
    interaction: Interaction
    items: dict[str, FeedbackItem] = field(default_factory=dict)
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class PostedTurn:
    """One posted interaction as a turn: its item (kept without the body), its facts and its tokens."""

    item: FeedbackItem
    facts: PostedFacts
    tokens: TurnTokens

    @property
    def name(self) -> str:
        """Id of the turn's item of feedback."""
        return self.item.feedback.id

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: turns with a number first, then turns without a number in the order of arrival."""
        feedback = self.item.feedback
        return feedback.turn if feedback.turn >= 0 else UNNUMBERED, feedback.received, self.item.seq


def tokens_of(item: Feedback, job: OnlineJob) -> TurnTokens:
    """Return the tokens that determine the place of a posted interaction in its episode's tree, or no tokens if it
    needs no place.

    No place is needed for posts of text and of keys that the job does not train on. Their tokens would only take
    memory until the episode is over. Tokens beyond the longest trainable prompt and answer are cut, because no trained
    turn extends them.
    """
    tokens = item.body.get("token_ids") or []
    if not tokens or not can_learn_from(item.key_id, job):
        return TurnTokens.of([], [])
    most = job.data.prompt.max_tokens + job.sampling.max_new_tokens
    prompt = (item.body.get("prompt_token_ids") or [])[:most]
    return TurnTokens.of(prompt, tokens[: most - len(prompt)])


@dataclass(slots=True)
class Arrivals:
    """Turns of a posted episode that have arrived."""

    numbers: set[int] = field(default_factory=set)
    next_number: int = 0
    """Lowest number of a turn that has not arrived."""
    last: int | None = None
    """Number of the last turn, once a client has marked one as final."""
    first: float = math.inf
    newest: float = -math.inf

    def add(self, turn: Feedback) -> None:
        """Record the arrival of a turn."""
        self.numbers.add(turn.turn)
        while self.next_number in self.numbers:
            self.next_number += 1
        if turn.final:
            self.last = turn.turn if self.last is None else max(self.last, turn.turn)
        self.first, self.newest = min(self.first, turn.received), max(self.newest, turn.received)

    def is_over(self, job: OnlineJob, now: float) -> bool:
        """Return True if the final turn and all turns before it have arrived, or if the episode has timed out."""
        if self.last is not None and self.next_number >= self.last:
            return True
        return is_out_of_time(job, first=self.first, newest=self.newest, now=now)

    def due(self, job: OnlineJob) -> float:
        """Return the time at which the episode times out (Unix seconds)."""
        return min(self.newest + job.online.idle_ttl_s, self.first + job.online.max_age_s)


@dataclass(frozen=True)
class Trajectory:
    """Turns that are trained as one sequence: each prompt after the first begins with all tokens before it.

    ``feedback`` holds every item that shares the trajectory's status; ``judges`` are the API keys whose feedback,
    on these or on later turns, determines the reward; ``share`` is its weight among the trajectories of its episode.
    """

    turns: tuple[Turn, ...]
    reward: float
    reason: str
    feedback: dict[str, FeedbackItem]
    judges: tuple[str, ...] = ()
    objective: Objective = "policy"
    share: float = 1.0
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons of the episode's turns that are never trained, by canonical id; only one trajectory of an episode has
    them."""

    @cached_property
    def first(self) -> int:
        """Lowest stream sequence number of the messages with the trajectory's interactions."""
        return min(turn.seq for turn in self.turns)

    @cached_property
    def min_version(self) -> int:
        """Oldest policy version that produced a token."""
        return min(span.version for turn in self.turns for span in turn.interaction.spans)

    @property
    def is_policy(self) -> bool:
        """True if the policy loss uses the trajectory."""
        return self.objective == "policy"

    @property
    def key_id(self) -> str:
        """API key of the newest feedback; without feedback the key that sent the request."""
        newest = max(self.feedback.values(), key=lambda item: arrival_order(item.feedback), default=None)
        return newest.feedback.key_id if newest is not None else self.turns[-1].interaction.key_id

    @property
    def user(self) -> str:
        """Pseudonym of the user to whose conversation the trajectory belongs."""
        return self.turns[-1].interaction.user

    @cached_property
    def owners(self) -> Owners:
        """API keys and users whose shares of a batch include this trajectory."""
        return owners_of_turns(self.turns, self.judges)


def owners_of_turns(turns: Sequence[Turn], judges: tuple[str, ...]) -> Owners:
    """Return the owners of a trajectory that consists of ``turns``; ``judges`` are the API keys that set its reward."""
    askers = tuple(sorted({turn.interaction.key_id for turn in turns}))
    return Owners(judges or askers, askers, (turns[-1].interaction.user,))


def is_out_of_time(job: OnlineJob, *, first: float, newest: float, now: float) -> bool:
    """Return True if an episode has timed out, because its ``newest`` or its ``first`` fact (Unix seconds) is too
    old."""
    return now - newest >= job.online.idle_ttl_s or now - first >= job.online.max_age_s


def first_late_time(turns: Sequence[Turn], items: Mapping[str, FeedbackItem], job: OnlineJob) -> float | None:
    """Return the arrival time of the first turn or item that arrived after the episode had timed out, or None.

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
        if is_out_of_time(job, first=begun, newest=active, now=came):
            return came
        if started < math.inf:
            active, begun = max(active, came), min(begun, started)
    return None


def turns_before(turns: Sequence[Turn], time: float) -> list[Turn]:
    """Return the turns that ended before ``time``, each with the feedback that had arrived by then."""
    return [
        Turn(turn.seq, turn.interaction, feedback_before(turn.items, time), turn.refusal)
        for turn in turns
        if turn.interaction.ended < time
    ]


def feedback_before(items: Mapping[str, FeedbackItem], time: float) -> dict[str, FeedbackItem]:
    """Return the items of feedback that arrived before ``time``."""
    return {name: item for name, item in items.items() if _arrival(item) < time}


def _arrival(item: FeedbackItem) -> float:
    return -math.inf if item.feedback.revision else item.feedback.received
