"""From turns to trajectories: what later turns earned comes back to earlier ones, and tokens are stored once. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.services.coordinator.online.admission import age
from penstock.services.coordinator.online.branches import ROOT, Tree, shares_of
from penstock.services.coordinator.online.shares import Owners
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.interaction import Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = ["Held", "Item", "Trajectory", "Turn", "joined", "owners_of_turns", "returns", "weights_of"]


@dataclass(frozen=True, slots=True)
class Item:
    """One item of feedback and the sequence of its message."""

    seq: int
    feedback: Feedback

    def is_again(self, seq: int, feedback: Feedback) -> bool:
        """Whether a later message holds the same item: a deletion stored it anew with what was left of its message."""
        mine = self.feedback
        same = (mine.revision, mine.key_id, mine.received) == (feedback.revision, feedback.key_id, feedback.received)
        is_value = mine.value in (None, feedback.value)  # of material it is left in the stream
        return seq > self.seq and same and is_value

    def is_revised_by(self, feedback: Feedback) -> bool:
        """Whether an item is its sender's newer word: nobody revises what others said."""
        return feedback.revision > self.feedback.revision and feedback.key_id == self.feedback.key_id


@dataclass(slots=True)
class Held:
    """An undecided item and where it is: with its ``holder`` (a turn or an episode, ``key``), or parked without one."""

    item: Item
    target: str
    key: str = ""
    holder: dict[str, Item] | None = None

    def move(self, seq: int) -> None:
        """Its message is another one now."""
        self.item = replace(self.item, seq=seq)
        if self.holder is not None:
            self.holder[self.item.feedback.id] = self.item


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
    also by what they said of later turns. ``share``: how much it weighs beside the others of its episode.
    """

    turns: tuple[Turn, ...]
    reward: float
    reason: str
    feedback: dict[str, Item]
    judges: tuple[str, ...] = ()
    objective: Objective = "policy"
    share: float = 1.0
    refused: dict[str, str] = field(default_factory=dict)
    """Other turns of its episode that are never trained on, by canonical id, and why; with one of its trajectories."""

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
        newest = max(self.feedback.values(), key=lambda item: age(item.feedback), default=None)
        return newest.feedback.key_id if newest is not None else self.turns[-1].interaction.key_id

    @property
    def user(self) -> str:
        """Whose conversation it is."""
        return self.turns[-1].interaction.user

    @cached_property
    def owners(self) -> Owners:
        """Who has a share of the batch by it."""
        return owners_of_turns(self.turns, self.judges)


def owners_of_turns(turns: Sequence[Turn], judges: tuple[str, ...]) -> Owners:
    """Who has a share of the batch by a trajectory of these turns that ``judges`` (keys) decide over."""
    askers = tuple(sorted({turn.interaction.key_id for turn in turns}))
    return Owners(judges or askers, askers, (turns[-1].interaction.user,))


def returns(
    rewards: Sequence[float], gamma: float, tree: Tree | None = None, counts: Sequence[bool] = ()
) -> list[float]:
    """``G_t = r_t + gamma * (mean of G_c over the turns c that go on from t)``; of one: ``r_t + gamma * G_{t+1}``.

    Args:
        tree: None: each turn goes on from the one before it.
        counts: whether each turn is trained, or something was said of it. Where several go on from one, those of which
            that holds neither for themselves nor for what follows do not dilute the others.
    """
    found, matters = list(rewards), [*counts] or [True] * len(rewards)
    children = tree.children if tree is not None else [[place] for place in range(1, len(rewards))] + [[]]
    for place in range(len(found) - 1, -1, -1):
        after = children[place]
        matters[place] = matters[place] or any(matters[child] for child in after)
        after = [child for child in after if matters[child]] or after
        if after:
            found[place] = rewards[place] + gamma * (sum(found[child] for child in after) / len(after))
    return found


def nearest(tree: Tree, place: int, among: Container[int]) -> tuple[int, bool]:
    """``(the nearest turn before one among these, whether it extends that by all its tokens)``; (-1, False): none."""
    extends = tree.extends[place]
    above = tree.parents[place]
    while above != ROOT and above not in among:
        extends = extends and tree.extends[above]
        above = tree.parents[above]
    return above, extends and above != ROOT


def weights_of(job: OnlineJob, tree: Tree, parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> dict[int, float]:
    """How much each trajectory for the policy loss weighs, by its first turn; ``lengths``: tokens that turns chose."""
    if job.online.balance == "trajectories":
        return {}
    part_of = {place: part for part, places in enumerate(parts) for place in places}
    above = (nearest(tree, places[0], part_of)[0] for places in parts)
    parents = [part_of.get(place, ROOT) for place in above]
    sizes = [sum(lengths[place] for place in places) for places in parts]
    by_length = sizes if job.algorithm.aggregation == "sequence_mean" else None
    return dict(zip((places[0] for places in parts), shares_of(parents, by_length), strict=True))


def joined(
    tree: Tree, kinds: Mapping[int, Hashable], values: Sequence[float], temperatures: Sequence[float]
) -> list[list[int]]:
    """Places of turns that make one trajectory each, in order; ``kinds`` of those that are trained, by their use.

    A turn continues the nearest one before it that is trained where its prompt begins with that turn's prompt and
    completion, token by token, nothing else goes on from there, and both are of one kind and have the same return and
    temperature: then one pass over the tokens serves both, and one reward says it all.
    """
    before = {place: nearest(tree, place, kinds) for place in kinds}
    following = Counter(above for above, _ in before.values())
    found: dict[int, list[int]] = {}
    for place in sorted(kinds):
        above, extends = before[place]
        same = extends and following[above] == 1 and kinds[above] == kinds[place]
        if same and math.isclose(values[above], values[place]) and temperatures[above] == temperatures[place]:
            found[place] = found[above]
            found[place].append(place)
        else:
            found[place] = [place]
    return [places for place, places in found.items() if places[0] == place]
