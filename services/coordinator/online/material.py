"""What material in feedback offers to the losses, and what has to be known of the answers that it is about. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import xxhash

from penstock.services.coordinator.online.credit import Item
from penstock.services.coordinator.online.names import canonical
from penstock.services.coordinator.online.posted import Facts, Present, Use
from penstock.services.coordinator.online.posted_episodes import PostedPart
from penstock.services.coordinator.online.shares import Owners
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = ["Offer", "Record", "between_texts", "offer_of_part", "targets_of", "version_of"]

TEXTS = "texts"


@dataclass(frozen=True, slots=True)
class Record:
    """What an offer has to know of an interaction that it is about; ``seq`` of its message."""

    seq: int
    key_id: str
    user: str
    prompt: str
    """Digest of the prompt's tokens."""
    num_prompt: int
    num_tokens: int
    untrainable: str
    split: str

    @classmethod
    def of(cls, seq: int, interaction: Interaction) -> Record:
        """Of an interaction."""
        return cls(
            seq=seq, key_id=interaction.key_id, user=interaction.user,
            prompt=xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(interaction.prompt_ids)),
            num_prompt=len(interaction.prompt_ids), num_tokens=len(interaction.token_ids),
            untrainable=interaction.untrainable, split=interaction.split,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Offer:
    """Material that can be admitted: one draw. ``reward`` of a preference is its strength, of a correction 1.

    What is for the policy loss may be admitted while ``settled_at`` holds: the version from which the next update
    starts, and the newest one that exists.
    """

    item: Item
    objective: Objective
    reason: str
    reward: float
    users: tuple[str, ...]
    """All whose conversations it is from, the preferred one first."""
    context: Mapping[str, int] = field(default_factory=dict)
    askers: tuple[str, ...] = ()
    version: int | None = None
    settled_at: tuple[int, int] = (0, 0)
    group: str = ""
    """What it has in common with others that answer the same task."""
    episode: str = ""
    """Of which it has turns: the first one is its item, ``later`` those that follow it. All that is offered of an
    episode is admitted together; ``riders`` are turns that nothing is learnt from, and that count by credit."""
    later: tuple[Item, ...] = ()
    riders: tuple[Item, ...] = ()
    share: float = 1.0

    @property
    def names(self) -> list[str]:
        """Ids of all items that are decided with it, its own first."""
        return [item.feedback.id for item in (self.item, *self.later, *self.riders)]

    @property
    def owners(self) -> Owners:
        """Who has a share of the batch by it."""
        judge = self.item.feedback.key_id
        return Owners((judge,), self.askers or (judge,), tuple(sorted(set(self.users))))

    def admission(self, ordinal: int, start: int, now: float) -> Admission:
        """Its entry in the ledger; ``start`` is the version from which the next update starts."""
        feedback, owners = self.item.feedback, self.owners
        return Admission(
            ordinal=ordinal, interactions={}, reward=self.reward,
            feedback={item.feedback.id: item.seq for item in (self.item, *self.later, *self.riders)},
            lag=0 if self.version is None else start - self.version, key_id=feedback.key_id, user=self.users[0],
            reason=self.reason, time=now, objective=self.objective, context=dict(self.context),
            judges=list(owners.judges), askers=list(owners.askers), users=list(owners.users),
            version=-1 if self.version is None else self.version, group=self.group, share=self.share,
            weight=self.share, origin=[self.episode, *self.names[: 1 + len(self.later)]] if self.episode else [],
        )  # fmt: skip


def version_of(facts: Facts, use: Use, now: Present) -> int | None:
    """The version that an answer is taken to be from; None: none that the policy loss would need."""
    return facts.version if use.reason in ("posted", "rescored") else now.newest if use.reason == "assumed" else None


def offer_of_part(key: str, part: PostedPart, now: Present) -> Offer:
    """What is offered of some turns of an episode."""
    first, use = part.turns[0], part.use
    versions = [version_of(turn.facts, use, now) for turn in part.turns]
    return Offer(
        first.item, use.objective, use.reason, use.reward, (first.item.feedback.user,),
        version=min((version for version in versions if version is not None), default=None),
        settled_at=(now.version, now.newest), group=first.facts.group if use.objective == "policy" else "",
        episode=key, later=tuple(turn.item for turn in part.turns[1:]),
        riders=tuple(turn.item for turn in part.riders), share=part.share,
    )  # fmt: skip


def between_texts(item: Item) -> Offer:
    """A worker makes tokens of the texts, and says what cannot be used."""
    feedback = item.feedback
    return Offer(item, "preference", TEXTS, float(feedback.body.get("strength", 1.0)), (feedback.user,))


def targets_of(item: Feedback) -> list[str]:
    """Interactions that an item is about, the preferred one first; none for what was not served here."""
    if item.kind == "interaction" or (item.kind == "preference" and not item.inference):
        return []
    names = [item.body["chosen"], item.body["rejected"]] if item.kind == "preference" else [item.inference]
    return [canonical(str(name)) for name in names]
