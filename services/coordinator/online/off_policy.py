"""Holds undecided off-policy examples: corrections, demonstrations, preferences and posted interactions. Pure.

An example waits for the records of the interactions that it refers to; a posted turn waits for the rest of its episode.
Then it is ready until the leader admits it or a fact about it changes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from penstock.services.coordinator.online.admission import (
    DRAWN_OTHERWISE,
    PolicyState,
    PostedFacts,
    admit_posted,
    facts_of,
)
from penstock.services.coordinator.online.episode import EPISODE_OVER, ROUNDING_S, EpisodeOutcome, PostedEpisode
from penstock.services.coordinator.online.examples import (
    InteractionRecord,
    KeyQuota,
    OffPolicyExample,
    posted_example,
    targets_of,
    text_preference,
)
from penstock.services.coordinator.online.turns import MAX_SEQ, FeedbackItem, PostedTurn, tokens_of
from penstock.services.coordinator.online.undecided import SLACK, LazyHeap
from penstock.services.coordinator.training.decided import episode_digest
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.live.interaction import Feedback, Interaction

__all__ = ["COMMENT", "DEMONSTRATION", "ClosedEpisodes", "OffPolicyExamples"]

MAX_CLOSED = 100_000
"""Maximum number of closed posted episodes that a leader keeps in memory."""
COMMENT, DEMONSTRATION = "comment", "demonstration"
EXAMPLES = frozenset({"interaction", "preference", "correction"})
"""Kinds of feedback that are examples; items of the metric `demonstration` are examples, too."""
EMPTY_BODY: dict[str, Any] = {}
"""Empty dictionary that all items without a body or tags share; never modified."""
MAX_RECHECKS = 4_000
"""Maximum number of posted interactions that one sweep settles again after a change of the policy, oldest first."""


class ClosedEpisodes:
    """Digests of the keys of decided posted episodes, so that a late turn does not begin a new episode."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        self._unrecorded: list[bytes] = []

    def __contains__(self, episode: str) -> bool:
        return episode_digest(episode) in self._digests

    def add(self, episode: str) -> None:
        """Add an episode that ended without training and that the ledger does not record yet."""
        digest = episode_digest(episode)
        self._unrecorded.append(digest)
        self.restore([digest])

    def restore(self, digests: Iterable[bytes]) -> None:
        """Add episodes that the ledger records, given by their digests."""
        for digest in digests:
            self._digests[digest] = None
            if len(self._digests) > MAX_CLOSED:
                self._digests.popitem(last=False)

    def drain(self) -> list[bytes]:
        """Return the digests of closed episodes that the ledger does not record yet; later calls do not return them
        again."""
        found, self._unrecorded = self._unrecorded, []
        return found


class OffPolicyExamples:
    """Holds the undecided off-policy examples of one job, and finds those that can be admitted.

    Attributes:
        items: examples by id; their bodies stay in the stream.
        ready: examples that can be admitted now.
        records: facts of the interactions that examples refer to, as far as they are known.
        quota: bytes of examples by API key.
    """

    def __init__(self, job: OnlineJob) -> None:
        self._job = job
        off_policy = job.online.off_policy
        supervised = off_policy is not None and off_policy.supervised is not None
        preference = off_policy is not None and off_policy.preference is not None
        self._unused_metrics = {COMMENT} | (set() if supervised else {DEMONSTRATION})
        self._unused_kinds = (set() if supervised else {"correction"}) | (set() if preference else {"preference"})
        self.items: dict[str, FeedbackItem] = {}
        self.ready: dict[str, OffPolicyExample] = {}
        self.records: dict[str, InteractionRecord] = {}
        self.distrusted: Collection[str] = frozenset()
        self.temperature = job.sampling.temperature
        """Current sampling temperature of the job."""
        self._missing: set[str] = set()
        """Interactions whose record is unknown, and to which examples refer or have referred since the newest sweep."""
        self._by_target: dict[str, dict[str, None]] = {}
        """Interaction -> examples that refer to it, in the order of their arrival."""
        self._unreferenced: set[str] = set()
        """Interactions that no example refers to; the next sweep drops their records."""
        self._changed_items: dict[str, None] = {}
        """Examples that the next sweep of all examples settles again, for instance because a record arrived."""
        self._settled_for: PolicyState | None = None
        """State of the policy at the newest sweep of all examples."""
        self._to_recheck: list[tuple[int, str]] = []
        """Posted interactions to settle again after a policy change: ``(order of arrival, id)``, the oldest last."""
        self._due = LazyHeap(self._is_due_at, lambda: len(self._episodes))
        """Times at which posted episodes end if no further turn arrives."""
        self._order: dict[str, int] = {}
        self._num_added = 0
        """Number of examples so far; orders examples by arrival."""
        self._queue: list[tuple[int, int, str]] = []
        self._queued: dict[str, tuple[int, int]] = {}
        """``_queue`` is a heap of ready examples by stream sequence number; readers skip entries that are no longer
        ready."""
        self._consenting: dict[str, tuple[str, ...]] = {}
        self._users: Counter[str] = Counter()
        """User -> number of ready examples and complete episodes that depend on the user's consent."""
        self.quota = KeyQuota()
        self._facts: dict[str, PostedFacts] = {}
        self._episodes: dict[str, PostedEpisode] = {}
        self._episode_keys: dict[str, str] = {}
        """Item -> the posted episode that it is a turn of."""
        self._parts: dict[str, list[str]] = {}
        """Posted episode -> ids of the ready examples that are its trajectories."""
        self.closed = ClosedEpisodes()
        """Decided posted episodes."""

    def accepts(self, item: Feedback) -> bool:
        """Return True if an item is an example of a kind that this job uses."""
        return (item.kind in EXAMPLES or item.metric == DEMONSTRATION) and not self.refusal(item)

    def refusal(self, item: Feedback) -> str:
        """Return the reason why the job uses an item neither as a reward nor as an example, or '' if it uses the
        item."""
        name, unused = (item.metric, self._unused_metrics) if item.kind == "metric" else (item.kind, self._unused_kinds)
        return f"{name}_is_no_reward" if name in unused else ""

    def add(self, seq: int, item: Feedback) -> FeedbackItem:
        """Add an example. Return its item in the form that is kept: without the fields that only training needs."""
        kept = {name: item.body[name] for name in ("chosen", "rejected", "strength") if name in item.body} or EMPTY_BODY
        if item.kind == "interaction":
            self._facts[item.id] = facts_of(item)
        held = FeedbackItem(seq, msgspec.structs.replace(item, body=kept, value=None, tags=EMPTY_BODY, fingerprint=""))
        self.items[item.id] = held
        self._order[item.id], self._num_added = self._num_added, self._num_added + 1
        self._remove_turn(item.id)
        nbytes = len(msgspec.msgpack.encode(item))
        if key := self.episode_key(item):
            self._episode_keys[item.id] = key
            turn = PostedTurn(held, self._facts[item.id], tokens_of(item, self._job))
            self._episodes.setdefault(key, PostedEpisode(key)).turns[item.id] = turn
            self._clear_ready(key)
            nbytes += turn.tokens.nbytes
        self.quota.add(item.key_id, item.id, nbytes)
        for target in targets_of(held.feedback):
            self._by_target.setdefault(target, {})[item.id] = None
            if target not in self.records:
                self._missing.add(target)
        return held

    def move(self, item: FeedbackItem) -> None:
        """Replace the item of an example by ``item``, its copy in a later message, which has a higher stream sequence
        number."""
        name = item.feedback.id
        self.items[name] = item
        self.quota.move(name)
        self.ready.pop(name, None)
        if key := self._episode_keys.get(name, ""):
            turns = self._episodes[key].turns
            turns[name] = replace(turns[name], item=item)
            self._clear_ready(key)

    def missing_records(self, item: Feedback) -> list[str]:
        """Return the ids of the interactions that an example refers to and whose records are missing."""
        return [name for name in targets_of(item) if name not in self.records]

    def on_interaction(self, name: str, seq: int, interaction: Interaction) -> list[str]:
        """Record an interaction (canonical id ``name``) if examples wait for it, and return these examples."""
        if name not in self._missing:
            return []
        self.add_record(name, InteractionRecord.of(seq, interaction))
        return self.examples_about([name])

    def add_record(self, name: str, record: InteractionRecord) -> None:
        """Add the record of an interaction to which an example refers, or to which a new example will refer."""
        self.records[name] = record
        self._missing.discard(name)
        self._changed_items.update(self._by_target.get(name, {}))
        if name not in self._by_target:
            self._unreferenced.add(name)

    def remove(self, name: str) -> None:
        """Remove an example that was decided, revised or retracted."""
        self.quota.remove(name)
        item = self.items.pop(name, None)
        self.ready.pop(name, None)
        self._unwatch_consent(name)
        self._facts.pop(name, None)
        self._order.pop(name, None)
        self._changed_items.pop(name, None)
        self._remove_turn(name)
        for target in targets_of(item.feedback) if item is not None else ():
            others = self._by_target.get(target, {})
            others.pop(name, None)
            if not others:
                self._by_target.pop(target, None)
                self._unreferenced.add(target)

    def episode_key(self, item: Feedback) -> str:
        """Return the key (API key id and name) of the posted episode that an item belongs to, or '' if it belongs to
        none."""
        if item.kind != "interaction" or not item.episode or not self._job.online.has_credit:
            return ""
        return f"{item.key_id} {item.episode}"

    def restore(self, state: LedgerState) -> None:
        """Restore the closed episodes that the ledger records."""
        for block in state.decided:
            self.closed.restore(block.closed)

    def on_admitted(self, admission: Admission) -> None:
        """Close the posted episode of an admission; turns that arrive from now on are too late."""
        if admission.origin and not admission.interactions:
            self.closed.restore([episode_digest(admission.origin[0])])

    def _remove_turn(self, name: str) -> None:
        """Remove an item from the turns of its posted episode; do nothing if it belongs to no episode."""
        key = self._episode_keys.pop(name, "")
        if key:
            del self._episodes[key].turns[name]
            self._clear_ready(key)
            if not (turns := self._episodes[key].turns):
                del self._episodes[key]
            else:
                self._changed_items[next(iter(turns))] = None

    def _clear_ready(self, key: str) -> None:
        """Withdraw the ready trajectories of an episode that changed."""
        for name in self._parts.pop(key, ()):
            self.ready.pop(name, None)
        self._unwatch_consent(key)

    def examples_about(self, interactions: Iterable[str]) -> list[str]:
        """Return the examples that refer to any of ``interactions``, in the order of the examples' arrival."""
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
        """Make examples and posted episodes ready; return the rejected items, each with the reason.

        The remaining ones wait for a record, for a version, or for more turns.

        Args:
            names: items that changed; unknown names are skipped.
            version: version from which the next update starts; the batches before it may not be trained yet.
            newest: newest version that exists.
            now: Unix seconds.
            everything: also settle examples for which time, the policy or a user's consent changed.
        """
        policy, refused = PolicyState(version, newest, self.temperature, self.distrusted), list[tuple[str, str]]()
        wanted = {name for name in names if name in self.items}
        if everything:
            wanted |= self._changed_without_facts(policy, now, opted_out)
        elif policy != self._settled_for:  # the policy may be back to its earlier state by the next full sweep
            self._changed_items.update(dict.fromkeys(wanted))
        found = sorted(wanted, key=self._order.__getitem__)
        for name in found:
            reason = "" if name in self._episode_keys else self._settle(name, version, newest, opted_out)
            refused += [(name, reason)] if reason else []
        for key in dict.fromkeys(self._episode_keys[name] for name in found if name in self._episode_keys):
            refused += self._settle_episode(key, policy, now, opted_out).items()
        return refused

    def _changed_without_facts(self, policy: PolicyState, now: float, opted_out: Callable[[str], bool]) -> set[str]:
        """Return the examples that a sweep settles in addition to those that its caller names.

        They are the examples in ``_changed_items``, the examples or turns of users who object now, and one turn of each
        overdue episode. After a change of the policy, each call also returns up to ``MAX_RECHECKS`` posted examples.
        """
        found = {name for name in self._changed_items if name in self.items}
        self._changed_items.clear()
        if policy != self._settled_for:
            posted = (name for name in self._facts if name in self.items)
            self._to_recheck = sorted(((self._order[name], name) for name in posted), reverse=True)
            self._settled_for = policy
        for order, name in (self._to_recheck.pop() for _ in range(min(MAX_RECHECKS, len(self._to_recheck)))):
            if self._order.get(name) == order:
                found.add(name)
        found |= {next(iter(self._episodes[key].turns)) for key in list(self._due.pop_until(now + ROUNDING_S))}
        objecting = {user for user in self._users if opted_out(user)}
        if objecting:
            units = (unit for unit, users in self._consenting.items() if not objecting.isdisjoint(users))
            found |= {next(iter(self._episodes[unit].turns)) if unit in self._episodes else unit for unit in units}
        return found

    def _is_due_at(self, due: float, key: str) -> bool:
        episode = self._episodes.get(key)
        return episode is not None and episode.due == due

    def _put_ready(self, name: str, example: OffPolicyExample) -> None:
        self.ready[name] = example
        place = example.item.seq, self._order[name]
        if self._queued.get(name) == place:
            return
        self._queued[name] = place
        heappush(self._queue, (*place, name))
        self._clean_queue()

    def _clean_queue(self) -> None:
        """Drop outdated entries from the heap once they outnumber the valid ones."""
        if len(self._queue) > 2 * len(self.ready) + SLACK:
            self._queued = {name: (example.item.seq, self._order[name]) for name, example in self.ready.items()}
            self._queue = [(*place, name) for name, place in self._queued.items()]
            heapify(self._queue)

    def _watch_consent(self, unit: str, users: Iterable[str]) -> None:
        """Record that ``unit``, a ready example or a complete episode, depends on the consent of ``users``."""
        self._unwatch_consent(unit)
        self._consenting[unit] = tuple(users)
        self._users.update(self._consenting[unit])

    def _unwatch_consent(self, unit: str) -> None:
        for user in self._consenting.pop(unit, ()):
            self._users[user] -= 1
            if not self._users[user]:
                del self._users[user]

    def _settle_episode(
        self, key: str, policy: PolicyState, now: float, opted_out: Callable[[str], bool]
    ) -> dict[str, str]:
        """Refuse the late turns of an episode; make the other turns ready together once the episode is over.

        Return the reasons of refused turns by item.
        """
        episode = self._episodes[key]
        self._clear_ready(key)
        if key in self.closed:
            return dict.fromkeys(episode.turns, EPISODE_OVER)
        late = episode.late_turns(self._job)
        for name in late:
            self._remove_turn(name)
        return late | self._offer_episode(key, episode, policy, now, opted_out)

    def _offer_episode(
        self, key: str, episode: PostedEpisode, policy: PolicyState, now: float, opted_out: Callable[[str], bool]
    ) -> dict[str, str]:
        """Make the trajectories of a finished episode ready for training, and return {}. If the episode has nothing to
        train, return the reason why each of its turns is rejected, by the turn's item.

        Also return {} while the episode waits for turns or for a policy version.
        """
        if not episode.is_over(self._job, now):
            self._due.put(episode.due, key)
            return {}
        users = [turn.item.feedback.user for turn in episode.turns.values()]
        self._watch_consent(key, users)
        if any(map(opted_out, users)):
            outcome: EpisodeOutcome[OffPolicyExample] | None = EpisodeOutcome(
                [], dict.fromkeys(episode.turns, self._job.online.without_consent)
            )
        else:
            outcome = episode.settle(self._job, policy)
        examples = [] if outcome is None else outcome.trajectories
        if outcome is not None and not examples:
            self.closed.add(key)
            return outcome.refused
        for example in examples:
            self._put_ready(example.item.feedback.id, example)
        self._parts[key] = [example.item.feedback.id for example in examples]
        return {}

    def ready_together(self) -> Iterator[list[OffPolicyExample]]:
        """Yield ready examples in the order of the stream, all examples of one episode together."""
        self._clean_queue()
        queue, episodes = self._queue.copy(), set[str]()
        while queue:
            *place, name = heappop(queue)
            example = self.ready.get(name)
            if example is None or [example.item.seq, self._order[name]] != place:
                continue
            if not example.episode:
                yield [example]
            elif example.episode not in episodes:
                episodes.add(example.episode)
                names = sorted(
                    self._parts[example.episode], key=lambda one: (self.ready[one].item.seq, self._order[one])
                )
                yield [self.ready[one] for one in names]

    def _settle(self, name: str, version: int, newest: int, opted_out: Callable[[str], bool]) -> str:
        """Settle an example that is no turn of an episode; return the reason to reject it, or '' if it waits or is
        ready."""
        item = self.items[name]
        self.ready.pop(name, None)
        self._unwatch_consent(name)
        if item.feedback.kind == "interaction":
            found = self._posted_example(item, version, newest)
        else:
            found = self._example_about_served(item) if targets_of(item.feedback) else text_preference(item)
        if isinstance(found, str):
            return found
        if found is not None:
            if any(opted_out(user) for user in found.users):
                return self._job.online.without_consent
            self._put_ready(name, found)
            self._watch_consent(name, found.users)
        return ""

    @property
    def lowest_seq(self) -> int:
        """Lowest stream sequence number of an interaction to which an undecided example refers, or ``MAX_SEQ`` without
        such an example."""
        return min((record.seq for record in self.records.values()), default=MAX_SEQ)

    def discard_unused_records(self) -> None:
        """Drop the records of interactions that no example refers to."""
        for name in self._unreferenced:
            if name not in self._by_target:
                self.records.pop(name, None)
                self._missing.discard(name)
        self._unreferenced.clear()

    def _posted_example(self, item: FeedbackItem, version: int, newest: int) -> OffPolicyExample | str | None:
        facts, feedback = self._facts[item.feedback.id], item.feedback
        policy = PolicyState(version, newest, self.temperature, self.distrusted)
        decision = admit_posted(facts, feedback.key_id, self._job, policy)
        if decision.verdict != "train":
            return decision.reason if decision.verdict == "reject" else None
        return posted_example([(item, facts)], decision, policy)

    def _example_about_served(self, item: FeedbackItem) -> OffPolicyExample | str | None:
        names = targets_of(item.feedback)
        if any(name not in self.records for name in names):
            return None
        records = [self.records[name] for name in names]
        refusal = self._refusal_by_records(item.feedback, records)
        if refusal:
            return refusal
        preference = item.feedback.kind == "preference"
        return OffPolicyExample(
            item, "preference" if preference else "supervised", item.feedback.metric or item.feedback.kind,
            float(item.feedback.body.get("strength", 1.0)),
            tuple(record.user for record in records),
            context={name: record.seq for name, record in zip(names, records, strict=True)},
            askers=tuple(sorted({record.key_id for record in records})),
        )  # fmt: skip

    def _refusal_by_records(self, feedback: Feedback, records: list[InteractionRecord]) -> str:
        """Return the reason to refuse an example because of the interactions that it refers to, or '' if there is none.

        ``records`` are the records of these interactions. Consent, split and lengths apply to imitation, too.
        """
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
