"""Feedback that is material itself: corrections, demonstrations, preferences, posted interactions. Pure.

It waits until the interactions that it is about are found among the records, and is offered to the losses it is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.admission import DRAWN_OTHERWISE
from penstock.services.coordinator.online.credit import Item
from penstock.services.coordinator.online.episode import UNKNOWN
from penstock.services.coordinator.online.holdings import Holdings
from penstock.services.coordinator.online.marks import SLACK, Marks
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
NOTHING: dict[str, Any] = {}
"""Body shared by items without one; never written to."""
LOOKED_AT = 4_000
"""Posted interactions, or episodes, that one sweep settles again where the policy moved on; the oldest first."""
ROUNDING_S = 1.0
"""So long before an episode is over by time each sweep looks at it: sums of times are not exact."""


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
        """Interactions without a record that items are, or were at the newest sweep, about."""
        self._by_target: dict[str, dict[str, None]] = {}
        """Interaction -> the items about it, in their order."""
        self._loose: set[str] = set()
        """Interactions that no item is about any more, or was yet: the next sweep lets go of their records."""
        self._dirty: dict[str, None] = {}
        """Items that the next sweep of all looks at: a record of theirs was found, or a user of theirs objects."""
        self._settled: Present | None = None
        """Inputs by which the newest sweep of all settled."""
        self._again: list[tuple[int, str]] = []
        """Posted interactions that are settled by what held before that, the oldest last."""
        self._due = Marks(self._is_due_at)
        """When posted episodes may be over by time."""
        self._order: dict[str, int] = {}
        self._added = 0
        """Items in the order in which they were taken in."""
        self._queue: list[tuple[int, int, str]] = []
        self._queued: dict[str, tuple[int, int]] = {}
        """Heap of what is ready, by place in the stream; what is not ready any more is passed over."""
        self._watched: dict[str, tuple[str, ...]] = {}
        self._users: Counter[str] = Counter()
        """Whose consent what is ready, or an episode that is over, rests on."""
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
        kept = {name: item.body[name] for name in ("chosen", "rejected", "strength") if name in item.body} or NOTHING
        if item.kind == "interaction":
            self._facts[item.id] = facts_of(item)
        held = Item(seq, msgspec.structs.replace(item, body=kept, value=None, tags=NOTHING, fingerprint=""))
        self.items[item.id] = held
        self._order[item.id], self._added = self._added, self._added + 1
        self._leave(item.id)
        nbytes = len(msgspec.msgpack.encode(item))
        if key := self.episode_of(item):
            self._places[item.id] = key
            turn = PostedTurn(held, self._facts[item.id], said_of(item, self._job))
            self._episodes.setdefault(key, PostedEpisode()).turns[item.id] = turn
            self._unready(key)
            nbytes += turn.said.nbytes
        self.holdings.add(item.key_id, item.id, nbytes)
        for target in targets_of(held.feedback):
            self._by_target.setdefault(target, {})[item.id] = None
            if target not in self.records:
                self._wanted.add(target)
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
        self._dirty.update(self._by_target.get(name, {}))
        if name not in self._by_target:
            self._loose.add(name)

    def remove(self, name: str) -> None:
        """An item is decided, or revised, or retracted."""
        self.holdings.remove(name)
        item = self.items.pop(name, None)
        self.ready.pop(name, None)
        self._unwatch(name)
        self._facts.pop(name, None)
        self._order.pop(name, None)
        self._dirty.pop(name, None)
        self._leave(name)
        for target in targets_of(item.feedback) if item is not None else ():
            others = self._by_target.get(target, {})
            others.pop(name, None)
            if not others:
                self._by_target.pop(target, None)
                self._loose.add(target)

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
            if not (turns := self._episodes[key].turns):
                del self._episodes[key]
            else:
                self._dirty[next(iter(turns))] = None

    def _unready(self, key: str) -> None:
        """Something changed about an episode: it is settled anew."""
        for name in self._parts.pop(key, ()):
            self.ready.pop(name, None)
        self._unwatch(key)

    def about(self, interactions: Iterable[str]) -> list[str]:
        """Items that are about any of these."""
        found = {name for target in interactions for name in self._by_target.get(target, ())}
        return sorted(found, key=self._order.__getitem__)

    def settle(
        self,
        names: Iterable[str],
        *,
        version: int,
        newest: int,
        now: float,
        opted_out: Callable[[str], bool],
        everything: bool = False,
    ) -> list[tuple[str, str]]:
        """Make items ready, and the turns of their episodes; those that are rejected, each with the reason.

        Others wait for a record, for a version, or for more turns.

        Args:
            names: what changed; others than items are passed over.
            version: from which the next update starts; the batches before it may not be trained yet.
            newest: version that exists.
            now: Unix seconds.
            everything: also those for which time, the policy or the consent of a user moved on.
        """
        present, refused = Present(version, newest, self.temperature, self.distrusted), list[tuple[str, str]]()
        wanted = {name for name in names if name in self.items}
        if everything:
            wanted |= self._changed(present, now, opted_out)
        elif present != self._settled:  # it may be back to what it was by the next sweep of all
            self._dirty.update(dict.fromkeys(wanted))
        found = sorted(wanted, key=self._order.__getitem__)
        for name in found:
            reason = "" if name in self._places else self._settle(name, version, newest, opted_out)
            refused += [(name, reason)] if reason else []
        for key in dict.fromkeys(self._places[name] for name in found if name in self._places):
            refused += self._settle_episode(key, present, now, opted_out).items()
        return refused

    def _changed(self, present: Present, now: float, opted_out: Callable[[str], bool]) -> set[str]:
        """Items to look at though nothing came: what was found is looked at once, and no more than LOOKED_AT again."""
        found = {name for name in self._dirty if name in self.items}
        self._dirty.clear()
        if present != self._settled:
            posted = (name for name in self._facts if name in self.items)
            self._again = sorted(((self._order[name], name) for name in posted), reverse=True)
            self._settled = present
        for order, name in (self._again.pop() for _ in range(min(LOOKED_AT, len(self._again)))):
            if self._order.get(name) == order:
                found.add(name)
        found |= {next(iter(self._episodes[key].turns)) for key in list(self._due.pop_until(now + ROUNDING_S))}
        objecting = {user for user in self._users if opted_out(user)}
        if objecting:
            units = (unit for unit, users in self._watched.items() if not objecting.isdisjoint(users))
            found |= {next(iter(self._episodes[unit].turns)) if unit in self._episodes else unit for unit in units}
        return found

    def _is_due_at(self, due: float, key: str) -> bool:
        episode = self._episodes.get(key)
        return episode is not None and episode.due == due

    def _put_ready(self, name: str, offer: Offer) -> None:
        self.ready[name] = offer
        place = offer.item.seq, self._order[name]
        if self._queued.get(name) == place:
            return
        self._queued[name] = place
        heappush(self._queue, (*place, name))
        self._clean_queue()

    def _clean_queue(self) -> None:
        """Take out what is not ready any more once it is as much as what is."""
        if len(self._queue) > 2 * len(self.ready) + SLACK:
            self._queued = {name: (offer.item.seq, self._order[name]) for name, offer in self.ready.items()}
            self._queue = [(*place, name) for name, place in self._queued.items()]
            heapify(self._queue)

    def _watch(self, unit: str, users: Iterable[str]) -> None:
        """Users on whose consent the ready part of an item or an episode rests."""
        self._unwatch(unit)
        self._watched[unit] = tuple(users)
        self._users.update(self._watched[unit])

    def _unwatch(self, unit: str) -> None:
        for user in self._watched.pop(unit, ()):
            self._users[user] -= 1
            if not self._users[user]:
                del self._users[user]

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
            self._due.put(episode.due or 0.0, key)
            return {}
        users = [turn.item.feedback.user for turn in episode.turns.values()]
        self._watch(key, users)
        if any(map(opted_out, users)):
            found: list[PostedPart] | dict[str, str] | None = dict.fromkeys(
                episode.turns, self._job.online.without_consent
            )
        else:
            found = episode.settle(self._job, present)
        if isinstance(found, dict):
            self.over.add(key, found)
            return found
        offers = {part.turns[0].item.feedback.id: offer_of_part(key, part, present) for part in found or []}
        for name, offer in offers.items():
            self._put_ready(name, offer)
        self._parts[key] = list(offers)
        return {}

    def together(self) -> Iterator[list[Offer]]:
        """What is ready, in the order of the stream; of an episode everything at once."""
        self._clean_queue()
        queue, episodes = self._queue.copy(), set[str]()
        while queue:
            *place, name = heappop(queue)
            offer = self.ready.get(name)
            if offer is None or [offer.item.seq, self._order[name]] != place:
                continue
            if not offer.episode:
                yield [offer]
            elif offer.episode not in episodes:
                episodes.add(offer.episode)
                names = sorted(self._parts[offer.episode], key=lambda one: (self.ready[one].item.seq, self._order[one]))
                yield [self.ready[one] for one in names]

    def _settle(self, name: str, version: int, newest: int, opted_out: Callable[[str], bool]) -> str:
        """Make an item ready that is decided by itself, or say why it is rejected."""
        item = self.items[name]
        self.ready.pop(name, None)
        self._unwatch(name)
        if item.feedback.kind == "interaction":
            found = self._posted(item, version, newest)
        else:
            found = self._about(item) if targets_of(item.feedback) else between_texts(item)
        if isinstance(found, str):
            return found
        if found is not None:
            if any(opted_out(user) for user in found.users):
                return self._job.online.without_consent
            self._put_ready(name, found)
            self._watch(name, found.users)
        return ""

    @property
    def lowest(self) -> int:
        """Lowest sequence of an interaction that an undecided item is about; a large number where there is none."""
        return min((record.seq for record in self.records.values()), default=UNKNOWN)

    def let_go(self) -> None:
        """Forget the records that no item is about any more."""
        for name in self._loose:
            if name not in self._by_target:
                self.records.pop(name, None)
                self._wanted.discard(name)
        self._loose.clear()

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
