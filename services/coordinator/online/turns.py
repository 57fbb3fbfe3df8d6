"""Defines turns, the feedback attached to them, and the trajectories that turns form. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from penstock.services.coordinator.online.admission import arrival_order
from penstock.services.coordinator.online.fairness import Owners
from penstock.shared.protocol.live.interaction import Feedback, Interaction, bare_id
from penstock.shared.protocol.objective import Objective

__all__ = ["FeedbackItem", "Holder", "Trajectory", "Turn", "canonical_id", "episode_key", "owners_of_turns"]

MAX_SEQ = 1 << 62
"""Sorts behind every sequence of a stream."""
DISCONNECTED = "client_disconnected"
"""Finish reason of an answer whose client seemed to have gone away."""


def canonical_id(text: str) -> str:
    """Return an id without its prefix, and any other text unchanged."""
    return bare_id(text) or text


def episode_key(interaction: Interaction) -> str:
    """Return the key of an interaction's episode. A name that an agent chose is scoped to its API key: others may
    choose it."""
    return bare_id(interaction.episode) or f"{interaction.key_id} {interaction.episode}"


class FeedbackItem(msgspec.Struct, frozen=True, gc=False):
    """One item of feedback and the sequence of its message in FEEDBACK.

    Neither this nor ``Feedback`` refers to what refers to it, so the garbage collector need not look: where a million
    wait, a full collection would stop the leader for seconds.
    """

    seq: int
    feedback: Feedback

    @property
    def target(self) -> str:
        """Interaction or episode that it is about; '' if it names none."""
        return self.feedback.inference or self.feedback.episode

    def is_copied_in(self, seq: int, feedback: Feedback) -> bool:
        """Return True if a later message holds the same item: a user's deletion copied the rest of a message further
        on."""
        own = self.feedback
        same = (own.revision, own.key_id, own.received) == (feedback.revision, feedback.key_id, feedback.received)
        is_value = own.value in (None, feedback.value)  # the body of an off-policy example stays in the stream
        return seq > self.seq and same and is_value

    def is_revised_by(self, feedback: Feedback) -> bool:
        """Return True if ``feedback`` is a newer revision by the same API key: no other key may revise an item."""
        return feedback.revision > self.feedback.revision and feedback.key_id == self.feedback.key_id


class Holder(msgspec.Struct, frozen=True, gc=False):
    """The dictionary of the turn or episode (``key``) that has an undecided item."""

    key: str
    items: dict[str, FeedbackItem]


@dataclass(slots=True)
class Turn:
    """One interaction, the sequence of its message, the feedback on it by id, and why it is refused, once known."""

    seq: int
    interaction: Interaction
    items: dict[str, FeedbackItem] = field(default_factory=dict)
    refusal: str | None = None


@dataclass(frozen=True)
class Trajectory:
    """Turns that are trained as one sequence: each prompt after the first begins with all tokens before it.

    ``feedback`` holds every item that shares the trajectory's status; ``judges`` are the API keys whose feedback made
    its reward, feedback on later turns included; ``share`` is its weight beside the other trajectories of its episode.
    """

    turns: tuple[Turn, ...]
    reward: float
    reason: str
    feedback: dict[str, FeedbackItem]
    judges: tuple[str, ...] = ()
    objective: Objective = "policy"
    share: float = 1.0
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons, by canonical id, of the episode's turns that are never trained; one of its trajectories has them."""

    @cached_property
    def first(self) -> int:
        """Sequence of the oldest interaction."""
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
        """Pseudonym of the user whose conversation this is."""
        return self.turns[-1].interaction.user

    @cached_property
    def owners(self) -> Owners:
        """Owners whose share of a batch the trajectory counts towards."""
        return owners_of_turns(self.turns, self.judges)


def owners_of_turns(turns: Sequence[Turn], judges: tuple[str, ...]) -> Owners:
    """Return the owners of a trajectory of these turns whose reward the keys ``judges`` gave."""
    askers = tuple(sorted({turn.interaction.key_id for turn in turns}))
    return Owners(judges or askers, askers, (turns[-1].interaction.user,))
