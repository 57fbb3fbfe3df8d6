"""Feedback that is material itself: corrections, demonstrations, preferences, posted interactions. Pure.

It waits until the interactions that it is about are found among the records, and is offered to the losses it is for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import xxhash

from penstock.services.coordinator.online.credit import Item
from penstock.services.coordinator.online.episode import UNKNOWN
from penstock.services.coordinator.online.names import canonical
from penstock.services.coordinator.online.posted import Facts, Present, facts_of, use_of
from penstock.services.coordinator.online.shares import Owners
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = ["Offer", "Offers", "Record", "targets_of"]

DEMONSTRATION, TEXTS = "demonstration", "texts"
MAX_PER_KEY = 10_000
"""Undecided items of one API key; beyond that its oldest ones go."""


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

    @property
    def owners(self) -> Owners:
        """Who has a share of the batch by it."""
        judge = self.item.feedback.key_id
        return Owners((judge,), self.askers or (judge,), tuple(sorted(set(self.users))))

    def admission(self, ordinal: int, start: int, now: float) -> Admission:
        """Its entry in the ledger; ``start`` is the version from which the next update starts."""
        feedback, owners = self.item.feedback, self.owners
        return Admission(
            ordinal=ordinal, interactions={}, feedback={feedback.id: self.item.seq}, reward=self.reward,
            lag=0 if self.version is None else start - self.version, key_id=feedback.key_id, user=self.users[0],
            reason=self.reason, time=now, objective=self.objective, context=dict(self.context),
            judges=list(owners.judges), askers=list(owners.askers), users=list(owners.users),
            version=-1 if self.version is None else self.version, group=self.group,
        )  # fmt: skip


class Offers:
    """Undecided material of one job.

    Attributes:
        items: by id of the feedback; their bodies are left in the stream.
        ready: those that can be admitted now.
        records: of the interactions that items are about, as far as they were found.
    """

    def __init__(self, job: OnlineJob) -> None:
        self._job = job
        self.items: dict[str, Item] = {}
        self.ready: dict[str, Offer] = {}
        self.records: dict[str, Record] = {}
        self.distrusted: Collection[str] = frozenset()
        self.temperature = job.sampling.temperature
        """At which the job samples by now."""
        self._wanted: set[str] = set()
        self._keys: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._facts: dict[str, Facts] = {}

    def takes(self, item: Feedback) -> bool:
        """Whether an item is material of a kind that this job uses."""
        return self._is_material(item) and not self.refusal(item)

    def refusal(self, item: Feedback) -> str:
        """Why an item is neither a reward nor material that this job uses; '' where it is one of them."""
        off_policy = self._job.online.off_policy
        supervised = off_policy is not None and off_policy.supervised is not None
        preference = off_policy is not None and off_policy.preference is not None
        match item.kind:
            case "preference":
                return "" if preference else "preference_is_no_reward"
            case "correction":
                return "" if supervised else "correction_is_no_reward"
            case "metric" if item.metric == DEMONSTRATION:
                return "" if supervised else "demonstration_is_no_reward"
            case "metric" if item.metric == "comment":
                return "comment_is_no_reward"
            case _:
                return ""

    def add(self, seq: int, item: Feedback) -> Item:
        """Take an item in; without what is only needed to train on it."""
        kept = {name: item.body[name] for name in ("chosen", "rejected", "strength") if name in item.body}
        if item.kind == "interaction":
            self._facts[item.id] = facts_of(item)
        held = Item(seq, msgspec.structs.replace(item, body=kept, value=None, tags={}, fingerprint=""))
        self.items[item.id] = held
        self._keys[item.key_id][item.id] = None
        self._wanted.update(set(targets_of(held.feedback)) - self.records.keys())
        return held

    def missing(self, item: Feedback) -> list[str]:
        """Interactions that an item of material is about and whose records are not known."""
        return [name for name in targets_of(item) if name not in self.records]

    def met(self, seq: int, interaction: Interaction) -> list[str]:
        """An interaction was read; the items that waited for it."""
        name = canonical(interaction.id)
        if name not in self._wanted:
            return []
        self.know(name, seq, interaction)
        return self.about([name])

    def know(self, name: str, seq: int, interaction: Interaction) -> None:
        """An interaction that an item is about, or will be in a moment."""
        self.records[name] = Record.of(seq, interaction)
        self._wanted.discard(name)

    def remove(self, name: str) -> None:
        """An item is decided, or revised, or retracted."""
        for ids in self._keys.values():
            ids.pop(name, None)
        self.items.pop(name, None)
        self.ready.pop(name, None)
        self._facts.pop(name, None)

    def excess(self, key_id: str) -> str:
        """The oldest item of a key that has too many; '' where it has not."""
        ids = self._keys[key_id]
        return next(iter(ids)) if len(ids) > MAX_PER_KEY else ""

    def about(self, interactions: Iterable[str]) -> list[str]:
        """Items that are about any of these."""
        gone = set(interactions)
        return [name for name, item in self.items.items() if gone.intersection(targets_of(item.feedback))]

    def settle(self, name: str, *, version: int, newest: int, opted_out: Callable[[str], bool]) -> str:
        """Make an item ready, or say why it is rejected; '' where it is ready or waits for a record or a version.

        Args:
            version: from which the next update starts; the batches before it may not be trained yet.
            newest: version that exists.
        """
        item = self.items[name]
        self.ready.pop(name, None)
        if item.feedback.kind == "interaction":
            found = self._posted(item, version, newest)
        else:
            found = self._about(item) if targets_of(item.feedback) else _between_texts(item)
        if isinstance(found, str):
            return found
        if found is not None:
            if any(opted_out(user) for user in found.users):
                return self._job.online.without_consent
            self.ready[name] = found
        return ""

    @property
    def lowest(self) -> int:
        """Lowest sequence of an interaction that an undecided item is about; a large number where there is none."""
        return min((record.seq for record in self.records.values()), default=UNKNOWN)

    def lonely(self) -> list[Item]:
        """Items that wait for a record; records that no item is about any more are forgotten."""
        needed = {name for item in self.items.values() for name in targets_of(item.feedback)}
        self._wanted = needed - self.records.keys()
        self.records = {name: record for name, record in self.records.items() if name in needed}
        return [item for item in self.items.values() if self.missing(item.feedback)]

    def _is_material(self, item: Feedback) -> bool:
        return item.kind in ("interaction", "preference", "correction") or item.metric == DEMONSTRATION

    def _posted(self, item: Item, version: int, newest: int) -> Offer | str | None:
        facts, feedback = self._facts[item.feedback.id], item.feedback
        now = Present(version, newest, self.temperature, self.distrusted)
        use = use_of(facts, feedback.key_id, self._job, now)
        if use.verdict != "take":
            return use.reason if use.verdict == "reject" else None
        known = facts.version if use.reason in ("posted", "rescored") else newest if use.reason == "assumed" else None
        return Offer(
            item, use.objective, use.reason, use.reward, (feedback.user,), version=known, settled_at=(version, newest),
            group=facts.group if use.objective == "policy" else "",
        )  # fmt: skip

    def _about(self, item: Item) -> Offer | str | None:
        names = targets_of(item.feedback)
        if any(name not in self.records for name in names):
            return None
        records = [self.records[name] for name in names]
        refusal = self._refused(item.feedback, records)
        if refusal:
            return refusal
        preference = item.feedback.kind == "preference"
        return Offer(
            item, "preference" if preference else "supervised", item.feedback.metric or item.feedback.kind,
            float(item.feedback.body.get("strength", 1.0)),
            tuple(record.user for record in records),
            context={name: record.seq for name, record in zip(names, records, strict=True)},
            askers=tuple(sorted({record.key_id for record in records})),
        )  # fmt: skip

    def _refused(self, feedback: Feedback, records: list[Record]) -> str:
        """Consent, split and lengths hold for imitation, too; how the answer was sampled does not matter."""
        same_key = self._job.online.raters == "same_key"
        checks = {
            "other_key": same_key and any(record.key_id != feedback.key_id for record in records),
            "prompts_differ": len({record.prompt for record in records}) > 1,
            "same_answer": len({record.seq for record in records}) < len(records),
            "no_tokens": any(not record.num_prompt for record in records),
            "prompt_too_long": any(record.num_prompt > self._job.data.prompt.max_tokens for record in records),
        }
        if feedback.kind == "preference":
            checks["no_tokens"] |= any(not record.num_tokens for record in records)
            checks["completion_too_long"] = any(r.num_tokens > self._job.sampling.max_new_tokens for r in records)
        for record in records:
            checks |= {
                record.untrainable: record.untrainable not in ("", "sampling_not_replayable", "client_disconnected"),
                f"split_{record.split}": record.split != "train",
            }
        return next((reason for reason, found in checks.items() if found), "")


def _between_texts(item: Item) -> Offer:
    """A worker makes tokens of the texts, and says what cannot be used."""
    feedback = item.feedback
    return Offer(item, "preference", TEXTS, float(feedback.body.get("strength", 1.0)), (feedback.user,))


def targets_of(item: Feedback) -> list[str]:
    """Interactions that an item is about, the preferred one first; none for what was not served here."""
    if item.kind == "interaction" or (item.kind == "preference" and not item.inference):
        return []
    names = [item.body["chosen"], item.body["rejected"]] if item.kind == "preference" else [item.inference]
    return [canonical(str(name)) for name in names]
