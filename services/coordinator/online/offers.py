"""Feedback that is material itself: corrections, demonstrations, preferences, posted interactions. Pure.

It waits until the interactions that it is about are found among the records, and is offered to the losses it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import msgspec

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.admission import DRAWN_OTHERWISE
from penstock.services.coordinator.online.credit import Item
from penstock.services.coordinator.online.episode import UNKNOWN
from penstock.services.coordinator.online.holdings import Holdings
from penstock.services.coordinator.online.material import (
    Offer,
    Record,
    between_texts,
    offer_of_part,
    targets_of,
    version_of,
)
from penstock.services.coordinator.online.names import canonical
from penstock.services.coordinator.online.over import Over
from penstock.services.coordinator.online.posted import Facts, Present, facts_of, use_of
from penstock.services.coordinator.online.posted_episodes import (
    EPISODE_OVER,
    PostedEpisode,
    PostedPart,
    PostedTurn,
    episode_of_item,
    said_of,
)
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import Feedback, Interaction

__all__ = ["Offers"]

DEMONSTRATION = "demonstration"


class Offers:
    """Undecided material of one job.

    Attributes:
        items: by id of the feedback; their bodies are left in the stream.
        ready: those that can be admitted now.
        records: of the interactions that items are about, as far as they were found.
        holdings: whose the items are, and what they take in the stream and here.
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
        self.holdings = Holdings()
        self._facts: dict[str, Facts] = {}
        self._episodes: dict[str, PostedEpisode] = {}
        self._places: dict[str, str] = {}
        """Item -> the episode that it is a turn of."""
        self._parts: dict[str, list[str]] = {}
        """Names under which the trajectories of an episode are ready."""
        self.over = Over()
        """Posted episodes that are decided."""
        self._used: dict[str, int] = {}
        """Items that were admitted before this leader, and the sequences of what they said then."""

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
        self._leave(item.id)
        nbytes = len(msgspec.msgpack.encode(item))
        if key := self.episode_of(item):
            self._places[item.id] = key
            turn = PostedTurn(held, self._facts[item.id], said_of(item, self._job))
            self._episodes.setdefault(key, PostedEpisode()).turns[item.id] = turn
            self._unready(key)
            nbytes += turn.said.nbytes
        self.holdings.add(item.key_id, item.id, nbytes)
        self._wanted.update(set(targets_of(held.feedback)) - self.records.keys())
        return held

    def move(self, item: Item) -> None:
        """An item is found elsewhere in the stream."""
        name = item.feedback.id
        self.items[name] = item
        self.holdings.move(name)
        self.ready.pop(name, None)
        if key := self._places.get(name, ""):
            turns = self._episodes[key].turns
            turns[name] = replace(turns[name], item=item)
            self._unready(key)

    def missing(self, item: Feedback) -> list[str]:
        """Interactions that an item of material is about and whose records are not known."""
        return [name for name in targets_of(item) if name not in self.records]

    def met(self, seq: int, interaction: Interaction) -> list[str]:
        """An interaction was read; the items that waited for it."""
        name = canonical(interaction.id)
        if name not in self._wanted:
            return []
        self.know(name, Record.of(seq, interaction))
        return self.about([name])

    def know(self, name: str, record: Record) -> None:
        """An interaction that an item is about, or will be in a moment."""
        self.records[name] = record
        self._wanted.discard(name)

    def remove(self, name: str) -> None:
        """An item is decided, or revised, or retracted."""
        self.holdings.remove(name)
        self.items.pop(name, None)
        self.ready.pop(name, None)
        self._facts.pop(name, None)
        self._leave(name)

    def episode_of(self, item: Feedback) -> str:
        """The posted episode that an item is a turn of; '' where it is decided by itself."""
        return episode_of_item(item, self._job)

    def recall(self, state: LedgerState, over: Iterable[tuple[str, str]] = ()) -> None:
        """What the ledger has admitted, as far as it still names it; ``over``: what was told of posted episodes."""
        self._used = dict(state.used)
        self.over.recall(over)
        for admission in state.admissions.values():
            self.taken(admission)
        self.over.drain()

    def reread(self, seq: int, item: Feedback) -> None:
        """An item was read that is decided already: what it said before it was revised is of no episode."""
        if self._used.get(item.id) == seq and (episode := self.episode_of(item)):
            self.over.add(episode)

    def taken(self, admission: Admission) -> None:
        """This stands in the ledger: a turn that comes now is too late."""
        if admission.origin and not admission.interactions:
            self.over.add(admission.origin[0])

    def _leave(self, name: str) -> None:
        """An item is not a turn of its episode any more."""
        key = self._places.pop(name, "")
        if key:
            del self._episodes[key].turns[name]
            self._unready(key)
            if not self._episodes[key].turns:
                del self._episodes[key]

    def _unready(self, key: str) -> None:
        """Something changed about an episode: it is settled anew."""
        for name in self._parts.pop(key, ()):
            self.ready.pop(name, None)

    def about(self, interactions: Iterable[str]) -> list[str]:
        """Items that are about any of these."""
        gone = set(interactions)
        return [name for name, item in self.items.items() if gone.intersection(targets_of(item.feedback))]

    def settle(
        self, names: Iterable[str], *, version: int, newest: int, now: float, opted_out: Callable[[str], bool]
    ) -> list[tuple[str, str]]:
        """Make items ready, and the turns of their episodes; those that are rejected, each with the reason.

        Others wait for a record, for a version, or for more turns.

        Args:
            version: from which the next update starts; the batches before it may not be trained yet.
            newest: version that exists.
            now: Unix seconds.
        """
        names, refused = list(names), list[tuple[str, str]]()
        for name in names:
            reason = "" if name in self._places else self._settle(name, version, newest, opted_out)
            refused += [(name, reason)] if reason else []
        for key in dict.fromkeys(self._places[name] for name in names if name in self._places):
            present = Present(version, newest, self.temperature, self.distrusted)
            refused += self._settle_episode(key, present, now, opted_out).items()
        return refused

    def _settle_episode(
        self, key: str, present: Present, now: float, opted_out: Callable[[str], bool]
    ) -> dict[str, str]:
        """Refuse the turns of an episode that came late, and offer the others together once it is over."""
        episode = self._episodes[key]
        self._unready(key)
        if key in self.over:
            return dict.fromkeys(episode.turns, EPISODE_OVER)
        late = episode.late(self._job)
        for name in late:
            self._leave(name)
        return late | self._offer(key, episode, present, now, opted_out)

    def _offer(
        self, key: str, episode: PostedEpisode, present: Present, now: float, opted_out: Callable[[str], bool]
    ) -> dict[str, str]:
        """Offer the turns of an episode that is over; why not, by item, where nothing of it is used."""
        if not episode.is_over(self._job, now):
            return {}
        if any(opted_out(turn.item.feedback.user) for turn in episode.turns.values()):
            found: list[PostedPart] | dict[str, str] | None = dict.fromkeys(
                episode.turns, self._job.online.without_consent
            )
        else:
            found = episode.settle(self._job, present)
        if isinstance(found, dict):
            self.over.add(key, found)
            return found
        offers = {part.turns[0].item.feedback.id: offer_of_part(key, part, present) for part in found or []}
        self.ready |= offers
        self._parts[key] = list(offers)
        return {}

    def together(self) -> list[list[Offer]]:
        """What is ready, in the order of the stream; of an episode everything at once."""
        found: dict[str, list[Offer]] = {}
        for name, offer in sorted(self.ready.items(), key=lambda one: one[1].item.seq):
            found.setdefault(offer.episode or name, []).append(offer)
        return list(found.values())

    def _settle(self, name: str, version: int, newest: int, opted_out: Callable[[str], bool]) -> str:
        """Make an item ready that is decided by itself, or say why it is rejected."""
        item = self.items[name]
        self.ready.pop(name, None)
        if item.feedback.kind == "interaction":
            found = self._posted(item, version, newest)
        else:
            found = self._about(item) if targets_of(item.feedback) else between_texts(item)
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
        return Offer(
            item, use.objective, use.reason, use.reward, (feedback.user,), version=version_of(facts, use, now),
            settled_at=(version, newest),
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
                record.untrainable: record.untrainable not in ("", *DRAWN_OTHERWISE, "client_disconnected"),
                f"split_{record.split}": record.split != "train",
            }
        return next((reason for reason, found in checks.items() if found), "")
