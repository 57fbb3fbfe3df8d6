"""Matches interactions with feedback, in whatever order they arrive, and settles their episodes.

Pure: inputs are facts, outputs statuses and trajectories. ``Matching`` holds undecided data; the ledger holds all
decisions (admissions, refusals, expiries). So a new leader that folds the ledger, and reads both streams from its
low-water marks, reaches the state of the previous leader.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from sys import intern

import msgspec

from penstock.services.coordinator.online.admission import is_far_off
from penstock.services.coordinator.online.episode import EPISODE_OVER, TOO_MANY_TURNS, ServedEpisode, without_objectors
from penstock.services.coordinator.online.examples import targets_of
from penstock.services.coordinator.online.off_policy import COMMENT, DEMONSTRATION, EMPTY_BODY, OffPolicyExamples
from penstock.services.coordinator.online.statuses import (
    CONSUMED,
    FinalStatuses,
    RefusedInteractions,
    feedback_status,
    same_reason,
)
from penstock.services.coordinator.online.trials import TrialSamples
from penstock.services.coordinator.online.turns import (
    DISCONNECTED,
    FeedbackItem,
    Holder,
    Trajectory,
    Turn,
    canonical_id,
    episode_key,
)
from penstock.services.coordinator.online.undecided import (
    LazyHeap,
    PendingRetractions,
    UndecidedFeedback,
    UnmatchedFeedback,
)
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import REWARD
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.live.interaction import (
    MAX_TURNS,
    Erasure,
    Feedback,
    FeedbackStatus,
    Interaction,
    StatusName,
)

__all__ = ["ERASED", "MAX_WAITING", "Matching", "max_ready", "overload_victims"]

TOO_MANY_WAITING, JOB_ENDED, ERASED, TOO_MANY_UNMATCHED = (
    "too_many_waiting",
    "job_ended",
    "erased",
    "too_many_unmatched",
)
MAX_WAITING = 50_000
"""Maximum number of undecided episodes; above this the leader rejects some."""
RELIEF = 0.75
"""Share of a limit to which the leader reduces a number of episodes above the limit, so that drops are rare."""


class Matching:
    """Undecided interactions and feedback of one job.

    Args:
        opted_out: returns True for a user (HMAC) whose data may not be trained on.
    """

    def __init__(self, job: OnlineJob, *, opted_out: Callable[[str], bool] = lambda user: False) -> None:
        self.job, self._opted_out = job, opted_out
        self.episodes: dict[str, ServedEpisode] = {}
        self.ready: dict[str, list[Trajectory]] = {}
        """Trajectories of settled episodes that are not admitted yet, by episode."""
        self.examples, self.trials = OffPolicyExamples(job), TrialSamples(job)
        self.unmatched, self.refused_interactions, self._pending_retractions = (
            UnmatchedFeedback(),
            RefusedInteractions(),
            PendingRetractions(),
        )
        """Feedback whose target is unknown, interactions that are never trained, retractions whose item is missing."""
        self._episode_keys: dict[str, str] = {}
        """Id of an undecided interaction, or of its episode -> key of the episode in ``episodes``."""
        self._undecided = UndecidedFeedback()
        self._holders: dict[str, Holder] = {}
        """Item that is matched with a target -> the dictionary that holds it."""
        self._metrics = {
            name: metric for name in {REWARD, *job.online.metrics} - {COMMENT, DEMONSTRATION}
            if (metric := job.online.metric(name)) is not None
        }  # fmt: skip
        """Metrics whose values are rewards, never off-policy examples."""
        self.final = FinalStatuses()
        self._changed_names: dict[str, None] = {}
        self._swept_version = -1
        """Policy version at the newest full sweep, a sweep that also settles episodes without new data."""
        self._settled_between_sweeps: set[str] = set()
        """Keys of episodes settled since the newest full sweep for a version other than ``_swept_version``."""
        self._next = (1, 1)
        self.num_waiting = 0
        """Number of undecided interactions."""
        self._num_started = 0
        """Number of episodes started so far; gives each episode its place in the order of their starts."""
        self._by_version: dict[int, dict[str, None]] = {}
        """Version -> episodes whose outcome may change once updates start from this version, because a token becomes
        too old, or stops being newer than the policy in the ledger."""
        self._turn_seqs = LazyHeap[str](self._is_turn_at, lambda: self.num_waiting)
        """Stream sequence numbers of undecided interactions, by episode."""
        self._due_times = LazyHeap[str](self._is_due_at, lambda: len(self.episodes))
        self._received_times = LazyHeap[str](self._is_expiring, self._undecided.items.__len__)
        """``_due_times``: times at which episodes change without new data. ``_received_times``: arrival times of items
        whose target or record is missing."""

    def restore(self, state: LedgerState) -> None:
        """Restore the decisions that the ledger names."""
        self.final.restore(state)
        self.examples.restore(state)

    # -- queries -------------------------------------------------------------------------------------------------------

    def low_water(self, without: Iterable[str] = ()) -> tuple[int, int]:
        """Return two stream sequence numbers, one in INTERACTIONS and one in FEEDBACK. Everything below them is
        decided. Episodes and items of feedback in ``without`` count as decided."""
        gone = set(without)
        items = {item for name in gone if name in self.episodes for item in self.episodes[name].feedback_ids}
        interactions, feedback = self._turn_seqs.lowest(gone), self._undecided.lowest_seq(gone | items)
        found = (self._next[1], feedback, self._pending_retractions.lowest_seq)
        return (
            int(self._next[0] if interactions is None else min(self._next[0], interactions)),
            int(min(seq for seq in found if seq is not None)),
        )

    def undecided_feedback(self, seq: int) -> list[str]:
        """Return the ids of all undecided items of feedback up to stream sequence number ``seq`` in FEEDBACK."""
        return [name for name, item in self._undecided.items.items() if item.seq <= seq]

    def has_feedback(self, item: str) -> bool:
        """Return True if an item of feedback is held here as undecided, or has a final status."""
        return item in self._undecided.items or item in self.final.feedback

    def end_times(self, admissions: Iterable[Admission]) -> list[float]:
        """Return the end time of each admission's last answer. Call before ``on_admitted``."""
        keys = ((one, self._episode_keys.get(next(reversed(one.interactions), ""), "")) for one in admissions)
        return [self.episodes[key].last_active if key in self.episodes else one.time for one, key in keys]

    # -- facts ---------------------------------------------------------------------------------------------------------

    def on_interaction(self, seq: int, interaction: Interaction) -> list[FeedbackStatus]:
        """Add an interaction, and match the feedback that waited for it; return the statuses of this feedback."""
        self._next = (max(self._next[0], seq + 1), self._next[1])
        name, episode_id = canonical_id(interaction.id), episode_key(interaction)
        self._changed_names.update(dict.fromkeys(self.examples.on_interaction(name, seq, interaction)))
        interaction = _compact(interaction)
        if name in self._episode_keys:
            if self.episodes[self._episode_keys[name]].complete(seq, interaction):
                self._index_turn(self._episode_keys[name], seq, interaction)
                self._mark_changed(self._episode_keys[name])
            return []
        if interaction.finish != DISCONNECTED and self.final.targets.get(name) == DISCONNECTED:
            self.final.targets.discard(name)  # another worker has completed the answer
        if name in self.final.targets:
            is_known = episode_id in self._episode_keys or episode_id in self.final.targets
            if interaction.index == 0 and not is_known:
                self._mark_decided(episode_id, self.final.targets[name])
            return []
        single = interaction.alone or interaction.index > 0 or not self.job.online.has_credit
        key = name if single else episode_id
        if key in self.final.targets:  # its episode is closed
            return self._exclude_turn(name, EPISODE_OVER, interaction)
        if key in self.episodes and len(self.episodes[key].turns) >= MAX_TURNS:
            return self._exclude_turn(name, TOO_MANY_TURNS, interaction)
        episode = self.episodes.get(key)
        if episode is None:
            episode = self.episodes[key] = ServedEpisode(single, place=self._num_started)
            self._num_started += 1
        turn = Turn(seq, interaction)
        episode.add(turn)
        self.num_waiting += 1
        self._index_turn(key, seq, interaction)
        self._episode_keys[name] = key
        if interaction.index == 0:
            self._episode_keys[episode_id] = key
            self.final.targets.discard(episode_id)
        self._changed_names[key] = None
        statuses = self._attach_unmatched(name, key, turn.items, interaction)
        return statuses + (
            self._attach_unmatched(episode_id, key, episode.items, interaction) if interaction.index == 0 else []
        )

    def on_feedback(self, seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        """Add an item of feedback; return the statuses that result."""
        if seq > self._next[1]:
            self._next = (self._next[0], seq)  # the message may hold more items
        if item.id in self.final.feedback:
            return self.final.status_of_late_revision(seq, item, now)
        if item.kind == "retraction":
            return self._retract(seq, item, now)
        is_retracted = item.id in self._pending_retractions.waiting
        if reason := f"by {self._pending_retractions.pop(item.id)}" if is_retracted else self._refusal(item):
            return self._close_feedback(item.id, "retracted" if is_retracted else "rejected", reason, now, seq)
        known = self._undecided.items.get(item.id)
        if known is not None:
            if known.is_copied_in(seq, item):
                self._move(seq, known)
            if not known.is_revised_by(item):
                return []
            self._detach(item.id)
        if not (item.kind == "metric" and item.metric in self._metrics) and self.examples.accepts(item):
            return self._add_example(seq, item, now)
        bare = msgspec.structs.replace(  # no reward depends on the fields removed here
            item, body=EMPTY_BODY, tags=EMPTY_BODY, fingerprint="", seq=item.seq or seq, job=intern(item.job),
            key_id=intern(item.key_id), metric=intern(item.metric), user=intern(item.user),
        )  # fmt: skip
        return self._attach(FeedbackItem(seq, bare), now)

    def _refusal(self, item: Feedback) -> str:
        """Return the reason to reject an item of feedback as soon as it arrives, or '' if there is none."""
        if item.kind == "metric" and (metric := self._metrics.get(item.metric)) is not None:
            is_erased = self.final.targets.get(item.inference) == ERASED
            return "out_of_range" if is_far_off(item.value, metric) else ERASED if is_erased else ""
        if reason := self.examples.refusal(item):
            return reason
        return ERASED if ERASED in map(self.final.targets.get, targets_of(item)) else ""

    def on_erasure(self, erasure: Erasure, now: float) -> list[FeedbackStatus]:
        """Remove the interactions and feedback that ``erasure`` (the deletion of a user's data) lists, and reject all
        other feedback on these interactions. Return the statuses."""
        statuses: list[FeedbackStatus] = []
        for name in map(canonical_id, erasure.feedback):
            self._end_feedback(name, ERASED)
        for name in map(canonical_id, erasure.interactions):
            key = self._episode_keys.pop(name, "")
            if key in self.episodes:
                statuses += self._erase(key, name, now)
            self._mark_decided(name, ERASED)
        return statuses + self.reject(
            self.examples.examples_about(map(canonical_id, erasure.interactions)), ERASED, now
        )

    def _erase(self, key: str, name: str, now: float) -> list[FeedbackStatus]:
        """Remove turn ``name`` from episode ``key``, and reject its feedback; discard an episode without turns."""
        episode = self.episodes[key]
        gone = [turn for turn in episode.turns if canonical_id(turn.interaction.id) == name]
        left = [turn for turn in episode.turns if turn not in gone]
        items = [item for turn in gone for item in turn.items] + ([] if left else list(episode.items))
        if left:
            episode.turns = left
            self.num_waiting -= len(gone)
            self._mark_changed(key)
        else:
            self._discard_episode(key, ERASED)
        return self.reject(items, ERASED, now)

    # -- decisions -----------------------------------------------------------------------------------------------------

    @property
    def num_changed(self) -> int:
        """Number of episodes and items that changed since they were last settled."""
        return len(self._changed_names)

    def sweep(
        self, *, version: int, now: float, newest: int | None = None, everything: bool = True, most: int | None = None
    ) -> list[FeedbackStatus]:
        """Settle complete episodes, refuse those that can never be trained, expire feedback without a target.

        Args:
            version: policy version from which the next update starts.
            newest: newest version that exists; None is ``version``.
            everything: also check episodes that did not change themselves (time passes, versions rise).
            most: number of changed episodes and items to settle; None settles all.
        """
        statuses: list[FeedbackStatus] = []
        changed = self._changed_names if most is None else dict.fromkeys(islice(self._changed_names, most))
        names = {name for name in changed if name in self.episodes}
        if everything or self._swept_version < 0:  # before the first sweep every episode counts as changed
            names |= self._changed_without_facts(version, now)
        elif version != self._swept_version:  # the next full sweep may start from this version or another one
            self._settled_between_sweeps |= names
        example_ids = [name for name in changed if name not in names]
        self._changed_names = (
            {} if most is None else {name: None for name in self._changed_names if name not in changed}
        )
        for name in sorted(names, key=lambda name: self.episodes[name].place):
            statuses += self._settle(name, version, now)
        known = version if newest is None else newest
        settled = self.examples.settle(
            example_ids, version=version, newest=known, now=now, opted_out=self._opted_out, everything=everything
        )
        statuses += [one for name, reason in settled for one in self._close_feedback(name, "rejected", reason, now)]
        return statuses + (self._expire(now) + self._shed_load(now) if everything else [])

    def on_admitted(self, admissions: Iterable[Admission]) -> None:
        """Mark the episodes and items of ``admissions`` as decided, because the ledger now records the admissions."""
        for admission in admissions:
            keys = {self._episode_keys.pop(name) for name in admission.interactions if name in self._episode_keys}
            self.examples.on_admitted(admission)
            for name in admission.feedback:
                self._detach(name)
            self.final.on_admitted([admission])
            for key in keys:
                self._discard_episode(key, CONSUMED)
            self.final.targets.add_all(admission.refused)

    def on_job_end(self, now: float) -> list[FeedbackStatus]:
        """Reject all undecided data, because a finished job admits nothing."""
        for key, episode in list(self.episodes.items()):
            self.refused_interactions.add(same_reason(episode.turns, JOB_ENDED), now)
            self._discard_episode(key, JOB_ENDED)
        return self.reject(list(self._undecided.items), JOB_ENDED, now)

    def reject(self, items: Iterable[str], reason: str, now: float) -> list[FeedbackStatus]:
        """Reject undecided feedback, given by ids; return its statuses."""
        return [one for name in items for one in self._close_feedback(name, "rejected", reason, now)]

    # -- internals -----------------------------------------------------------------------------------------------------

    def _add_example(self, seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        """Add an off-policy example; return its status, and those of older examples that exceed its key's quota."""
        self._undecided.add(self.examples.add(seq, item))
        if self.examples.missing_records(item):
            self._received_times.put(item.received, item.id)
        self._changed_names[item.id] = None
        matched = feedback_status(item.id, "matched", "", now)
        return [matched, *self.reject(self.examples.quota.excess(item.key_id), TOO_MANY_WAITING, now)]

    def _attach(self, item: FeedbackItem, now: float) -> list[FeedbackStatus]:
        feedback = item.feedback
        target = item.target
        if (reason := self.final.targets.get(target)) is not None:
            return self._close_feedback(feedback.id, "rejected", reason, now, item.seq)
        self._undecided.add(item)
        key = self._episode_keys.get(target)
        if key is None:
            self._received_times.put(feedback.received, feedback.id)
            return [
                one
                for oldest in self.unmatched.add(target, item)
                for one in self._expired(oldest, now, TOO_MANY_UNMATCHED)
            ]
        return self._attach_to_turn(item, key, *self.episodes[key].holder(target), now)

    def _attach_to_turn(
        self, item: FeedbackItem, key: str, holder: dict[str, FeedbackItem], asker: str, now: float
    ) -> list[FeedbackStatus]:
        """Add an item to ``holder``, the feedback on its target; reject the item if its key may not judge the target.

        ``asker`` is the API key that received the target's answer.
        """
        name = item.feedback.id
        if self.job.online.raters == "same_key" and item.feedback.key_id != asker:
            return self._close_feedback(name, "rejected", "other_key", now)
        self._holders[name], holder[name] = Holder(key, holder), item
        self._mark_changed(key)
        return [feedback_status(name, "matched", "", now, [item.target])]

    def _move(self, seq: int, item: FeedbackItem) -> None:
        """Update the stream sequence number of an item that was stored again when a user's data was deleted."""
        name, moved = item.feedback.id, msgspec.structs.replace(item, seq=seq)
        self._undecided.remove(name)
        self._undecided.add(moved)
        if (holder := self._holders.get(name)) is not None:
            holder.items[name] = moved
            self._mark_changed(holder.key)
        elif name in self.examples.items:
            self.examples.move(moved)
            self._changed_names[name] = None
        else:
            self.unmatched.add(item.target, moved)

    def _detach(self, name: str) -> None:
        """Remove an undecided item from each collection that holds it, such as that of feedback on its target."""
        item = self._undecided.remove(name)
        if item is None:
            return
        if (holder := self._holders.pop(name, None)) is not None:
            holder.items.pop(name, None)
            self._mark_changed(holder.key)
        elif name in self.examples.items:  # the revision may be of another kind
            self.examples.remove(name)
        else:
            self.unmatched.remove(item.target, name)

    def _attach_unmatched(
        self, target: str, key: str, holder: dict[str, FeedbackItem], interaction: Interaction
    ) -> list[FeedbackStatus]:
        """Attach the feedback that waited for ``target``; expire items whose wait ended before the target came."""
        statuses: list[FeedbackStatus] = []
        for item in self.unmatched.pop(target).values():
            if interaction.ended > item.feedback.received + self.job.online.match_ttl_s:
                statuses += self._expired(item, interaction.ended)
                continue
            found = max(interaction.ended, item.feedback.received)
            statuses += self._attach_to_turn(item, key, holder, interaction.key_id, found)
        return statuses

    def _exclude_turn(self, name: str, reason: str, interaction: Interaction) -> list[FeedbackStatus]:
        """Refuse a turn whose episode is over or full, and reject the feedback that waited for the turn."""
        self._mark_decided(name, reason)
        self.refused_interactions.add({name: reason}, interaction.ended)
        return self.reject(self.unmatched.pop(name), reason, interaction.ended)

    def _retract(self, seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        name = canonical_id(str(item.body.get("feedback", "")))
        if name in self.final.feedback:
            return self._close_feedback(item.id, "rejected", self.final.retraction_refusal(name), now)
        statuses = self._close_feedback(item.id, "retracted", f"retracts {name}", now)
        if name not in self._undecided.items:  # the retraction arrived before its item
            given_up = self._pending_retractions.put(name, seq, item)
            return statuses + ([feedback_status(given_up, "expired", TOO_MANY_UNMATCHED, now)] if given_up else [])
        self._detach(name)
        return [*self._close_feedback(name, "retracted", f"by {item.id}", now), *statuses]

    def _changed_without_facts(self, version: int, now: float) -> set[str]:
        """Return episodes to settle again without new data: after a new policy version, a due time, or an opt-out."""
        low, high = sorted((self._swept_version, version))
        found = {name for at, names in self._by_version.items() if low < at <= high for name in names}
        found = (found | self._settled_between_sweeps) & self.episodes.keys()
        self._settled_between_sweeps.clear()
        self._swept_version = version
        for at in [at for at in self._by_version if at < version - self.job.train.max_lag - 1]:
            del self._by_version[at]  # refused batches revert versions, but no further than this
        found.update(self._due_times.pop_until(now))
        return found | {key for key in self.ready if any(map(self._opted_out, self.episodes[key].users))}

    def _index_turn(self, key: str, seq: int, interaction: Interaction) -> None:
        """Index an episode by the stream sequence number of a turn, and by the policy versions whose publication
        may change the episode's outcome."""
        self._turn_seqs.put(seq, key)
        for version in self._versions(interaction):
            self._by_version.setdefault(version, {})[key] = None

    def _versions(self, interaction: Interaction) -> set[int]:
        """Return the first version at which the answer is too old to train on, and the version of its last token."""
        versions = [span.version for span in interaction.spans] or [0]
        return {min(versions) + self.job.train.max_lag + 1, max(versions)}

    def _is_turn_at(self, seq: float, key: str) -> bool:
        return key in self.episodes and any(turn.seq == seq for turn in self.episodes[key].turns)

    def _is_due_at(self, due: float, key: str) -> bool:
        return key in self.episodes and key not in self.ready and self.episodes[key].due == due

    def _is_expiring(self, received: float, name: str) -> bool:
        """Return True if item ``name``, received at ``received``, still lacks its target or a record that it needs."""
        item = self._undecided.items.get(name)
        if item is None or item.feedback.received != received or name in self._holders:
            return False
        return name not in self.examples.items or bool(self.examples.missing_records(item.feedback))

    def _settle(self, key: str, version: int, now: float) -> list[FeedbackStatus]:
        episode = self.episodes[key]
        self.ready.pop(key, None)
        outcome = episode.settle(self.job, version=version, now=now)
        if self.job.online.canary is not None:
            sample = None if outcome is None or any(map(self._opted_out, episode.users)) else outcome.trial_sample
            self.trials.update(canonical_id(episode.turns[0].interaction.id), sample)
        if outcome is None:
            if episode.due < math.inf:
                self._due_times.put(episode.due, key)
            return []
        outcome = without_objectors(outcome, self._opted_out, self.job.online.without_consent)
        if good := outcome.trajectories:
            self.ready[key] = [replace(good[0], refused=outcome.refused), *good[1:]]
            return []
        return self._refuse(key, [*outcome.refused.values()][-1], now, outcome.refused)

    def _refuse(
        self, key: str, reason: str, now: float, reasons: Mapping[str, str] | None = None
    ) -> list[FeedbackStatus]:
        """Refuse an episode and its feedback for ``reason``; turns in ``reasons`` (by id) have their own reason."""
        episode = self.episodes[key]
        reason_of_turn = same_reason(episode.turns, reason) | dict(reasons or {})
        self.refused_interactions.add(reason_of_turn, now)
        reason_of_item = dict.fromkeys(episode.items, reason)
        reason_of_item |= {
            name: reason_of_turn[canonical_id(turn.interaction.id)] for turn in episode.turns for name in turn.items
        }
        statuses = [
            one
            for name, why_not in reason_of_item.items()
            for one in self._close_feedback(name, "rejected", why_not, now)
        ]
        self._discard_episode(key, reason)
        self.final.targets.add_all(reason_of_turn)
        return statuses

    def _shed_load(self, now: float) -> list[FeedbackStatus]:
        """Refuse episodes if more are ready than can be trained in time, or if more are held than memory allows."""
        statuses: list[FeedbackStatus] = []
        most = max_ready(self.job.max_draws)
        if len(self.ready) > most:
            oldest = sorted(self.ready.items(), key=lambda one: min(trajectory.first for trajectory in one[1]))
            for name in overload_victims(((found[0].owners.judges[0], name) for name, found in oldest), most):
                statuses += self._refuse(name, TOO_MANY_WAITING, now)
        if len(self.episodes) > MAX_WAITING:
            for name in overload_victims(
                ((episode.asker, name) for name, episode in self.episodes.items()), MAX_WAITING
            ):
                statuses += self._refuse(name, TOO_MANY_WAITING, now)
        return statuses

    def _expire(self, now: float) -> list[FeedbackStatus]:
        limit = now - self.job.online.match_ttl_s
        expired = [
            feedback_status(name, "expired", "unknown_target", now) for name in self._pending_retractions.expire(limit)
        ]
        late = [self._undecided.items[name] for name in self._received_times.pop_until(limit, inclusive=False)]
        self.examples.discard_unused_records()
        return expired + [one for item in late for one in self._expired(item, now)]

    def _expired(self, item: FeedbackItem, now: float, reason: str = "unknown_target") -> list[FeedbackStatus]:
        return self._close_feedback(item.feedback.id, "expired", reason, now)

    def _close_feedback(
        self, name: str, status: StatusName, reason: str, now: float, seq: int = 0
    ) -> list[FeedbackStatus]:
        """Set the final status of feedback that was not admitted; pass ``seq`` if the item was never held."""
        self._end_feedback(name, status, seq)
        return [feedback_status(name, status, reason, now)]

    def _end_feedback(self, name: str, how: str, seq: int = 0) -> None:
        item = self._undecided.items.get(name)
        self._detach(name)
        self.final.record(name, how, seq if item is None else max(seq, item.seq))

    def _mark_changed(self, key: str) -> None:
        """Schedule an episode to be settled again."""
        self.ready.pop(key, None)
        self._changed_names[key] = None

    def _discard_episode(self, key: str, reason: str) -> None:
        """Remove an episode, and mark its key, its id and the ids of its turns as decided."""
        episode = self.episodes.pop(key, None)
        self.ready.pop(key, None)
        for turn in episode.turns if episode is not None else []:
            self.num_waiting -= 1
            self._unindex_turn(key, turn.interaction)
            name = canonical_id(turn.interaction.id)
            if name in self._episode_keys:
                self._mark_decided(name, reason)
            episode_id = episode_key(turn.interaction)
            if self._episode_keys.get(episode_id) == key:
                self._mark_decided(episode_id, reason)
        self._mark_decided(key, reason)

    def _unindex_turn(self, key: str, interaction: Interaction) -> None:
        for version in self._versions(interaction):
            keys = self._by_version.get(version, {})
            keys.pop(key, None)
            if not keys:
                self._by_version.pop(version, None)

    def _mark_decided(self, name: str, reason: str) -> None:
        self._episode_keys.pop(name, None)
        self.final.targets[name] = reason


def _compact(interaction: Interaction) -> Interaction:
    """Return an interaction with numbers in arrays (16 bytes for a token instead of about 80) and without texts."""
    try:
        return msgspec.structs.replace(
            interaction, prompt_ids=array("i", interaction.prompt_ids), token_ids=array("i", interaction.token_ids),
            logprobs=array("d", interaction.logprobs), text="", prompt="",
        )  # fmt: skip
    except (OverflowError, TypeError):  # no model has such tokens; the refusal needs them unchanged
        return interaction


def max_ready(max_draws: int) -> int:
    """Return the maximum number of ready episodes; more would become too old before they are trained."""
    return max(256, 4 * max_draws)


def overload_victims(waiting: Iterable[tuple[str, str]], most: int) -> list[str]:
    """Return the names to drop if ``waiting`` (pairs of owner and name, oldest first) has more than ``most`` pairs.

    They are the oldest names of the owner with the most names. One call drops at most as many as this owner has more
    than the next one, or a quarter of its names if that is more.
    """
    by_owner: defaultdict[str, list[str]] = defaultdict(list)
    for owner, name in waiting:
        by_owner[owner].append(name)
    excess = sum(map(len, by_owner.values()))
    if excess <= most:
        return []
    excess -= int(RELIEF * most)
    sizes = sorted(map(len, by_owner.values()))
    heaviest = max(by_owner.values(), key=len)
    ahead = sizes[-1] - sizes[-2] if len(sizes) > 1 else sizes[-1]
    return heaviest[: min(excess, max(ahead, len(heaviest) // 4, 1))]
