"""From turns to trajectories: what later turns earned comes back to earlier ones, and tokens are stored once. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.services.coordinator.online.shares import Owners
from penstock.shared.protocol.interaction import Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = ["Held", "Item", "Trajectory", "Turn", "joined", "returns"]


@dataclass(frozen=True, slots=True)
class Item:
    """One item of feedback and the sequence of its message."""

    seq: int
    feedback: Feedback


@dataclass(slots=True)
class Held:
    """An undecided item and where it is: with its ``holder`` (a turn or an episode, ``key``), or parked without one."""

    item: Item
    target: str
    key: str = ""
    holder: dict[str, Item] | None = None


@dataclass(slots=True)
class Turn:
    """One interaction, the sequence of its message, what was said of it, by id, and why it is refused once known."""

    seq: int
    interaction: Interaction
    items: dict[str, Item] = field(default_factory=dict)
    refusal: str | None = None


@dataclass(frozen=True)
class Trajectory:
    """Turns that are trained as one: each prompt but the first begins with all tokens before it.

    ``feedback`` is everything whose fate is that of the trajectory; ``judges`` are the keys that its reward comes from,
    also by what they said of later turns.
    """

    turns: tuple[Turn, ...]
    reward: float
    reason: str
    feedback: dict[str, Item]
    judges: tuple[str, ...] = ()
    objective: Objective = "policy"

    @cached_property
    def first(self) -> int:
        """Sequence of its oldest interaction."""
        return min(turn.seq for turn in self.turns)

    @cached_property
    def min_version(self) -> int:
        """Oldest policy version of a token."""
        return min(span.version for turn in self.turns for span in turn.interaction.spans)

    @property
    def is_policy(self) -> bool:
        """Whether the policy loss uses it."""
        return self.objective == "policy"

    @property
    def key_id(self) -> str:
        """Who decided its reward: the newest feedback's key, else the key that asked."""
        newest = max(self.feedback.values(), key=lambda item: (item.feedback.received, item.seq), default=None)
        return newest.feedback.key_id if newest is not None else self.turns[-1].interaction.key_id

    @property
    def user(self) -> str:
        """Whose conversation it is."""
        return self.turns[-1].interaction.user

    @cached_property
    def owners(self) -> Owners:
        """Who has a share of the batch by it."""
        askers = tuple(sorted({turn.interaction.key_id for turn in self.turns}))
        return Owners(self.judges or askers, askers, (self.user,))


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """``G_t = r_t + gamma * G_{t+1}`` of each turn."""
    found: list[float] = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        found.append(later)
    return found[::-1]


def joined(turns: Sequence[Turn], values: Sequence[float]) -> list[list[int]]:
    """Places of turns that make one trajectory each, in order.

    A turn continues the one before it where its prompt begins with that turn's prompt and completion, token by token,
    and both have the same return and temperature: then one pass over the tokens serves both, and one reward says it
    all. A prompt that was rendered anew, another return or temperature, begins a new trajectory.
    """
    found: list[list[int]] = []
    for place, turn in enumerate(turns):
        if place and _continues(turns[place - 1], turn) and math.isclose(values[place - 1], values[place]):
            found[-1].append(place)
        else:
            found.append([place])
    return found


def _continues(before: Turn, turn: Turn) -> bool:
    so_far = [*before.interaction.prompt_ids, *before.interaction.token_ids]
    prompt = turn.interaction.prompt_ids
    if before.interaction.sampling.temperature != turn.interaction.sampling.temperature:
        return False
    return len(prompt) >= len(so_far) and prompt[: len(so_far)] == so_far
