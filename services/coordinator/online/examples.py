"""Defines off-policy examples (items of feedback that are themselves trained on), and the quota of each API key for
undecided examples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import xxhash

from penstock.services.coordinator.online.admission import AS_SAMPLED, Decision, PolicyState, PostedFacts
from penstock.services.coordinator.online.fairness import Owners
from penstock.services.coordinator.online.turns import FeedbackItem
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.live.interaction import Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = [
    "InteractionRecord",
    "KeyQuota",
    "OffPolicyExample",
    "posted_example",
    "targets_of",
    "text_preference",
]

TEXTS = "texts"
MAX_PER_KEY = 10_000
"""Maximum undecided examples of one API key; above this its oldest ones are rejected."""
MAX_BYTES = 1 << 30
"""Maximum size of the stream FEEDBACK (bytes) that is assumed until the leader has read the actual one."""
SHARE_OF_KEY, SHARE_OF_ALL = 1 / 8, 1 / 2
"""Maximum shares of the size of FEEDBACK that the undecided examples of one API key, and of all keys together, may
take."""


@dataclass(frozen=True, slots=True)
class InteractionRecord:
    """Facts about a served interaction to which an example refers; ``seq`` is the stream sequence number of the
    interaction's message."""

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
    def of(cls, seq: int, interaction: Interaction) -> InteractionRecord:
        """Extract the facts of an interaction."""
        return cls(
            seq=seq, key_id=interaction.key_id, user=interaction.user,
            prompt=xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(interaction.prompt_ids)),
            num_prompt=len(interaction.prompt_ids), num_tokens=len(interaction.token_ids),
            untrainable=interaction.untrainable, split=interaction.split,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OffPolicyExample:
    """A training example made of one or more items of feedback. The leader admits it as one draw, that is, as one group
    of a batch.

    ``reward`` is the strength of a preference, the reward of a posted interaction, or 1 (correction, demonstration).
    ``settled_at`` has the version from which the next update started and the newest version that existed when the
    example was settled: while both are unchanged, the leader may admit the example for the policy loss.
    """

    item: FeedbackItem
    objective: Objective
    reason: str
    reward: float
    users: tuple[str, ...]
    """Pseudonyms of all users whose conversations the example uses; the user of the preferred answer comes first."""
    context: Mapping[str, int] = field(default_factory=dict)
    askers: tuple[str, ...] = ()
    version: int | None = None
    settled_at: tuple[int, int] = (0, 0)
    group: str = ""
    """Name shared by the examples that answer the same task."""
    episode: str = ""
    """Key of the posted episode whose turns ``item`` and ``later`` are, or '' for an example that is no turn of an
    episode.

    The leader admits all examples of an episode together; ``untrained`` has turns that only count by credit.
    """
    later: tuple[FeedbackItem, ...] = ()
    untrained: tuple[FeedbackItem, ...] = ()
    share: float = 1.0

    @property
    def feedback_ids(self) -> list[str]:
        """Ids of all items that are decided with the example, the id of ``item`` first."""
        return [item.feedback.id for item in (self.item, *self.later, *self.untrained)]

    @property
    def owners(self) -> Owners:
        """API keys and users whose shares of a batch include this example."""
        judge = self.item.feedback.key_id
        return Owners((judge,), self.askers or (judge,), tuple(sorted(set(self.users))))

    def admission(self, ordinal: int, start: int, now: float) -> Admission:
        """Build the ledger's record of this example's admission as draw ``ordinal``.

        ``start`` is the version from which the next update starts.
        """
        feedback, owners = self.item.feedback, self.owners
        return Admission(
            ordinal=ordinal, interactions={}, reward=self.reward,
            feedback={item.feedback.id: item.seq for item in (self.item, *self.later, *self.untrained)},
            lag=0 if self.version is None else start - self.version, key_id=feedback.key_id, user=self.users[0],
            reason=self.reason, time=now, objective=self.objective, context=dict(self.context),
            judges=list(owners.judges), askers=list(owners.askers), users=list(owners.users),
            version=-1 if self.version is None else self.version, group=self.group, share=self.share,
            weight=self.share, origin=[self.episode, *self.feedback_ids[: 1 + len(self.later)]] if self.episode else [],
        )  # fmt: skip


def posted_example(
    posts: Sequence[tuple[FeedbackItem, PostedFacts]],
    decision: Decision,
    policy: PolicyState,
    *,
    episode: str = "",
    share: float = 1.0,
    untrained: tuple[FeedbackItem, ...] = (),
) -> OffPolicyExample:
    """Build the example of one posted interaction, or of turns of an ``episode`` that form one trajectory."""
    (first, facts), is_policy = posts[0], decision.objective == "policy"
    versions = [_sampler_version(one, decision.reason, policy) for _, one in posts]
    return OffPolicyExample(
        first, decision.objective, decision.reason, decision.reward, (first.feedback.user,),
        version=min((version for version in versions if version is not None), default=None),
        settled_at=(policy.version, policy.newest), group=facts.group if is_policy else "",
        episode=episode, later=tuple(item for item, _ in posts[1:]), untrained=untrained, share=share,
    )  # fmt: skip


def _sampler_version(facts: PostedFacts, reason: str, policy: PolicyState) -> int | None:
    """Return the policy version that is treated as the sampler of a posted answer. Return None if the admission rule
    with the name ``reason`` needs no version."""
    return facts.version if reason in AS_SAMPLED else policy.newest if reason == "assumed" else None


def text_preference(item: FeedbackItem) -> OffPolicyExample:
    """Build the example of a preference between two posted texts, which a worker tokenizes (and may reject) later."""
    feedback = item.feedback
    return OffPolicyExample(item, "preference", TEXTS, float(feedback.body.get("strength", 1.0)), (feedback.user,))


def targets_of(item: Feedback) -> list[str]:
    """Return the ids of the served interactions that an item refers to, the preferred answer first; [] if there are
    none."""
    if item.kind == "interaction" or (item.kind == "preference" and not item.inference):
        return []
    if item.kind == "preference":
        return [str(item.body["chosen"]), str(item.body["rejected"])]
    return [item.inference]


class KeyQuota:
    """Counts the bytes of undecided examples by API key, and bounds them for each key and for all keys together.

    Attributes:
        max_bytes: maximum size of the stream FEEDBACK; the bounds are shares of it.
    """

    def __init__(self) -> None:
        self.max_bytes = MAX_BYTES
        self._keys: dict[str, dict[str, int]] = {}
        self._keys_of: dict[str, str] = {}
        self._nbytes: dict[str, int] = {}
        self.nbytes = 0
        """Total bytes of all counted examples."""

    def add(self, key_id: str, name: str, nbytes: int) -> None:
        """Count an example of ``nbytes`` bytes for the API key ``key_id``."""
        self.remove(name)
        self._keys.setdefault(key_id, {})[name] = nbytes
        self._keys_of[name] = key_id
        self._nbytes[key_id] = self._nbytes.get(key_id, 0) + nbytes
        self.nbytes += nbytes

    def remove(self, name: str) -> None:
        """Stop counting the example ``name``; do nothing if it is not counted."""
        key_id = self._keys_of.pop(name, None)
        if key_id is None:
            return
        nbytes = self._keys[key_id].pop(name)
        self._nbytes[key_id] -= nbytes
        self.nbytes -= nbytes
        if not self._keys[key_id]:
            del self._keys[key_id], self._nbytes[key_id]

    def move(self, name: str) -> None:
        """Make an example the newest of its API key, so that it is the last to be rejected for the quota."""
        items = self._keys[self._keys_of[name]]
        items[name] = items.pop(name)

    def excess(self, key_id: str) -> list[str]:
        """Return the examples to reject after ``key_id`` has posted one: the oldest ones of this key if it exceeds its
        bounds, and the oldest ones of the key with the most bytes if all keys together exceed their bound.

        The newest example of a key stays, however large it is.
        """
        of_key = self._keys.get(key_id, {})
        found = _oldest(of_key, len(of_key) - MAX_PER_KEY, self._nbytes.get(key_id, 0) - SHARE_OF_KEY * self.max_bytes)
        left = self.nbytes - sum(of_key[name] for name in found) - SHARE_OF_ALL * self.max_bytes
        if left > 0:
            heaviest = self._keys[self._heaviest()]
            found += [name for name in _oldest(heaviest, 0, left) if name not in found]
        return found

    def older_half(self) -> list[str]:
        """Return the older half of the examples of the key with the most bytes."""
        heaviest = self._keys[self._heaviest()] if self._keys else {}
        return list(heaviest)[: (len(heaviest) + 1) // 2]

    def _heaviest(self) -> str:
        return max(self._nbytes, key=lambda key_id: self._nbytes[key_id])


def _oldest(items: dict[str, int], count: int, nbytes: float) -> list[str]:
    """Return the oldest ids of ``items`` (id -> bytes), just enough to have at least ``count`` ids and ``nbytes``
    bytes. Never include the newest id."""
    found: list[str] = []
    for name, size in islice(items.items(), max(0, len(items) - 1)):
        if count <= 0 and nbytes <= 0:
            break
        found.append(name)
        count, nbytes = count - 1, nbytes - size
    return found
