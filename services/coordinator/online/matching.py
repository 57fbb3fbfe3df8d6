"""Interactions and feedback find each other, in whatever order they arrive. Pure: facts in, fates and trajectories out.

What is undecided lives here; what is decided stands in the ledger (admitted) or follows again from the same facts
(refused, expired), so a new leader that reads the two streams from where the ledger says is where the old one was.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from sys import intern

import msgspec

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.admission import out_of_range
from penstock.services.coordinator.online.canary import Trials
from penstock.services.coordinator.online.credit import Held, Item, Trajectory, Turn
from penstock.services.coordinator.online.crowding import MAX_WAITING, crowded, most_ready
from penstock.services.coordinator.online.episode import CUT, Episode
from penstock.services.coordinator.online.fates import fate
from penstock.services.coordinator.online.marks import Marks
from penstock.services.coordinator.online.material import targets_of
from penstock.services.coordinator.online.names import canonical, episode_of
from penstock.services.coordinator.online.offers import NOTHING as NO_BODY
from penstock.services.coordinator.online.offers import Offers
from penstock.services.coordinator.online.overtaken import Overtaken
from penstock.services.coordinator.online.parked import Parked
from penstock.services.coordinator.online.posted_episodes import EPISODE_OVER, TOO_MANY_TURNS
from penstock.services.coordinator.online.recalled import NOTHING, Told
from penstock.services.coordinator.online.refusals import Refusals, reasons_of
from penstock.services.coordinator.online.verdicts import CONSUMED, Verdicts
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import MAX_TURNS, Erasure, Fate, Feedback, Interaction

__all__ = ["ERASED", "Matching"]

CROWDED, ENDED, ERASED, PARKED = "too_many_waiting", "job_ended", "erased", "too_many_parked"


class Matching:
    """What is undecided of one job.

    Args:
        opted_out: whether a user (HMAC) does not want to be trained on.
    """

    def __init__(self, job: OnlineJob, *, opted_out: Callable[[str], bool] = lambda user: False) -> None:
        self.job, self._opted_out = job, opted_out
        self.episodes: dict[str, Episode] = {}
        self.ready: dict[str, list[Trajectory]] = {}
        """Trajectories of episodes that are settled and not admitted yet, by episode."""
        self.offers, self.trials = Offers(job), Trials(job)
        self.parked, self.refusals, self._overtaken = Parked(), Refusals(), Overtaken()
        """Feedback whose target is not known yet; interactions that are never trained on."""
        self._places: dict[str, str] = {}
        """Undecided interaction, or another name of an episode -> its episode."""
        self._items: dict[str, Held] = {}
        """Undecided feedback, by id."""
        self.verdicts = Verdicts()
        self._touched: dict[str, None] = {}
        self._swept = -1
        """Version at the newest sweep of all."""
        self._between: set[str] = set()
        """Episodes that were settled by another version since."""
        self._next = (1, 1)
        self.num_waiting = 0
        """Interactions without a decision."""
        self._begun = 0
        """Episodes so far, which places them in the order in which they began."""
        self._at_version: dict[int, dict[str, None]] = {}
        """Version -> episodes for which it matters whether it is reached: a token is too old from then on, or known."""
        self._read, self._said = Marks(self._is_read_at), Marks(self._is_said_at)
        """Places of undecided interactions, by episode, and of undecided feedback."""
        self._due, self._expiring = Marks(self._is_due_at), Marks(self._is_expiring)
        """When time alone changes an episode, and when items without a target were received."""

    def recall(self, state: LedgerState, told: Told = NOTHING) -> None:
        """What the ledger has admitted, as far as it still names it, and what earlier leaders told."""
        self.verdicts.recall(state, told)
        self.offers.recall(state, told.over)

    # -- what others ask ---------------------------------------------------------------------------------------------

    def lowest(self, without: Iterable[str] = ()) -> tuple[int, int]:
        """Sequences below which everything is decided once the episodes, and items, ``without`` are, too."""
        gone = set(without)
        said = {item for name in gone if name in self.episodes for item in self.episodes[name].said_ids}
        read, feedback = self._read.lowest(gone), self._said.lowest(gone | said)
        found = (self._next[1], feedback, self._overtaken.lowest)
        return (
            int(self._next[0] if read is None else min(self._next[0], read)),
            int(min(seq for seq in found if seq is not None)),
        )

    def undecided(self, seq: int) -> list[str]:
        """Feedback up to this sequence that has no last fate."""
        return [name for name, held in self._items.items() if held.item.seq <= seq]

    def knows(self, item: str) -> bool:
        """Whether feedback waits here, or has its last fate."""
        return item in self._items or item in self.verdicts

    def ended(self, admissions: Iterable[Admission]) -> list[float]:
        """When the last answer of each was given; these are not taken yet."""
        keys = ((one, self._places.get(next(reversed(one.interactions), ""), "")) for one in admissions)
        return [self.episodes[key].last_active if key in self.episodes else one.time for one, key in keys]

    # -- facts -------------------------------------------------------------------------------------------------------

    def on_interaction(self, seq: int, interaction: Interaction) -> list[Fate]:
        """A record was read. Feedback that waited for it is matched now."""
        self._next = (max(self._next[0], seq + 1), self._next[1])
        self._touched.update(dict.fromkeys(self.offers.met(seq, interaction)))
        interaction = _compact(interaction)
        name, episode_id = canonical(interaction.id), episode_of(interaction)
        if name in self._places:
            if self.episodes[self._places[name]].complete(seq, interaction):
                self._watch(self._places[name], seq, interaction)
                self._unready(self._places[name])
            return []
        if interaction.finish != CUT and self.verdicts.targets.get(name) == CUT:
            self.verdicts.targets.forget(name)  # its gateway was only stalled, and another worker has completed it
        if name in self.verdicts.targets:
            is_known = episode_id in self._places or episode_id in self.verdicts.targets
            if interaction.index == 0 and not is_known:
                self._decide(episode_id, self.verdicts.targets[name])
            return []
        single = interaction.alone or interaction.index > 0 or not self.job.online.has_credit
        key = name if single else episode_id
        if key in self.verdicts.targets:  # its episode was over
            return self._excluded(name, EPISODE_OVER, interaction)
        if key in self.episodes and len(self.episodes[key].turns) >= MAX_TURNS:
            return self._excluded(name, TOO_MANY_TURNS, interaction)
        episode = self.episodes.get(key)
        if episode is None:
            episode = self.episodes[key] = Episode(single, place=self._begun)
            self._begun += 1
        turn = Turn(seq, interaction)
        episode.add(turn)
        self.num_waiting += 1
        self._watch(key, seq, interaction)
        self._places[name] = key
        if interaction.index == 0:
            self._places[episode_id] = key
            self.verdicts.targets.forget(episode_id)
        self._touched[key] = None
        fates = self._unpark(name, key, turn.items, interaction)
        return fates + (self._unpark(episode_id, key, episode.items, interaction) if interaction.index == 0 else [])

    def on_feedback(self, seq: int, item: Feedback, now: float) -> list[Fate]:
        """An item was read."""
        self._next = (self._next[0], max(self._next[1], seq))  # a message holds several items
        if item.id in self.verdicts:
            self.offers.reread(seq, item)
            return self.verdicts.revised(seq, item, now)
        if item.kind == "retraction":
            return self._retract(seq, item, now)
        if item.id in self._overtaken:
            last = fate(item.id, "retracted", f"by {self._overtaken.pop(item.id)}", now)
            return self._close(item.id, last, seq)
        reason = self.offers.refusal(item) or ("out_of_range" if out_of_range(item, self.job.online) else "")
        if reason or any(self.verdicts.targets.get(one) == ERASED for one in targets_of(item)):
            reason = reason or ERASED
            return self._close(item.id, fate(item.id, "rejected", reason, now), seq)
        known = self._items.get(item.id)
        if known is not None:
            if known.item.is_again(seq, item):
                self._move(seq, known)
            if not known.item.is_revised_by(item):
                return []
            self._detach(item.id)
        # No reward depends on what is left out of one that is no material.
        bare = msgspec.structs.replace(
            item, body=NO_BODY, tags=NO_BODY, fingerprint="", seq=item.seq or seq, job=intern(item.job),
            key_id=intern(item.key_id), metric=intern(item.metric), user=intern(item.user),
        )  # fmt: skip
        return self._offer(seq, item, now) if self.offers.takes(item) else self._attach(Item(seq, bare), now)

    def on_erasure(self, erasure: Erasure, now: float) -> list[Fate]:
        """A user's interactions and feedback do not exist any more."""
        fates: list[Fate] = []
        for name in map(canonical, erasure.feedback):
            self._shut(name, ERASED)
        for name in map(canonical, erasure.interactions):
            key = self._places.pop(name, "")
            if key in self.episodes:
                fates += self._erase(key, name, now)
            self._decide(name, ERASED)
        return fates + self.reject(self.offers.about(map(canonical, erasure.interactions)), ERASED, now)

    def _erase(self, key: str, name: str, now: float) -> list[Fate]:
        """Take a turn out of its episode, which is over where it was the last one."""
        episode = self.episodes[key]
        gone = [turn for turn in episode.turns if canonical(turn.interaction.id) == name]
        left = [turn for turn in episode.turns if turn not in gone]
        said = [item for turn in gone for item in turn.items] + ([] if left else list(episode.items))
        if left:
            episode.turns = left
            self.num_waiting -= len(gone)
            self._unready(key)
        else:
            self._forget(key, ERASED)
        return self.reject(said, ERASED, now)

    # -- decisions ---------------------------------------------------------------------------------------------------

    @property
    def num_touched(self) -> int:
        """Episodes and items that changed since they were settled."""
        return len(self._touched)

    def sweep(
        self, *, version: int, now: float, newest: int | None = None, everything: bool = True, most: int | None = None
    ) -> list[Fate]:
        """Settle what can be settled, refuse what can never be trained, expire what found no target.

        Args:
            version: policy version from which the next update starts.
            newest: version that exists; None: that one.
            everything: look at all episodes, not only at those that changed (time passes, versions rise).
            most: of what changed; None: all of it.
        """
        fates: list[Fate] = []
        touched = self._touched if most is None else dict.fromkeys(islice(self._touched, most))
        names = {name for name in touched if name in self.episodes}
        if everything or self._swept < 0:  # before the first one there is nothing that was not touched
            names |= self._changed(version, now)
        elif version != self._swept:  # it may be another one, or this one again, by the next sweep of all
            self._between |= names
        offered = [name for name in touched if name not in names]
        self._touched = {} if most is None else {name: None for name in self._touched if name not in touched}
        for name in sorted(names, key=lambda name: self.episodes[name].place):
            fates += self._settle(name, version, now)
        known = version if newest is None else newest
        settled = self.offers.settle(
            offered, version=version, newest=known, now=now, opted_out=self._opted_out, everything=everything
        )
        fates += [one for name, reason in settled for one in self._close(name, fate(name, "rejected", reason, now))]
        return fates + (self._expire(now) + self._relieve(now) if everything else [])

    def take(self, admissions: Iterable[Admission]) -> None:
        """These stand in the ledger: their episodes are decided."""
        for admission in admissions:
            keys = {self._places.pop(name) for name in admission.interactions if name in self._places}
            self.offers.taken(admission)
            for name in admission.feedback:
                self._detach(name)
            self.verdicts.take([admission])
            for key in keys:
                self._forget(key, CONSUMED)
            self.verdicts.targets.update(admission.refused)

    def end(self, now: float) -> list[Fate]:
        """The job is over: nothing is admitted any more."""
        for key, episode in list(self.episodes.items()):
            self.refusals.add(reasons_of(episode.turns, ENDED), now)
            self._forget(key, ENDED)
        return self.reject(list(self._items), ENDED, now)

    def reject(self, items: Iterable[str], reason: str, now: float) -> list[Fate]:
        """Undecided feedback counts for nothing."""
        return [one for name in items for one in self._close(name, fate(name, "rejected", reason, now))]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _offer(self, seq: int, item: Feedback, now: float) -> list[Fate]:
        """Take in an item that is material itself."""
        self._items[item.id] = Held(self.offers.add(seq, item), "", holder=self.offers.items)
        self._said.put(seq, item.id)
        if self.offers.missing(item):
            self._expiring.put(item.received, item.id)
        self._touched[item.id] = None
        matched = fate(item.id, "matched", "", now)
        return [matched, *self.reject(self.offers.holdings.excess(item.key_id), CROWDED, now)]

    def _attach(self, item: Item, now: float) -> list[Fate]:
        feedback = item.feedback
        target = canonical(feedback.inference or feedback.episode)
        if target in self.verdicts.targets:
            return self._close(feedback.id, fate(feedback.id, "rejected", self.verdicts.targets[target], now), item.seq)
        held = self._items[feedback.id] = Held(item, target)
        self._said.put(item.seq, feedback.id)
        key = self._places.get(target)
        if key is None:
            self._expiring.put(feedback.received, feedback.id)
            return [one for oldest in self.parked.put(target, item) for one in self._expired(oldest, now, PARKED)]
        return self._hold(held, key, *self.episodes[key].holder(target), now)

    def _hold(self, held: Held, key: str, holder: dict[str, Item], asker: str, now: float) -> list[Fate]:
        """An item has found its target, which ``asker`` (a key) was served."""
        name = held.item.feedback.id
        if self.job.online.raters == "same_key" and held.item.feedback.key_id != asker:
            return self._close(name, fate(name, "rejected", "other_key", now))
        held.key, held.holder, holder[name] = key, holder, held.item
        self._unready(key)
        return [fate(name, "matched", "", now, [held.target])]

    def _move(self, seq: int, held: Held) -> None:
        """An item was read again further on, where a deletion left it: the message that it was in is gone."""
        held.move(seq)
        self._said.put(seq, held.item.feedback.id)
        if held.holder is None:
            self.parked.put(held.target, held.item)
        elif held.key:
            self._unready(held.key)
        else:
            self.offers.move(held.item)
            self._touched[held.item.feedback.id] = None

    def _detach(self, name: str) -> None:
        """Take an undecided item away from where it is: another turn may have the name of its target by now."""
        held = self._items.pop(name, None)
        if held is None:
            return
        if held.holder is None:
            self.parked.remove(held.target, name)
            return
        if held.holder is self.offers.items:  # a revision may be of another kind
            self.offers.remove(name)
            return
        held.holder.pop(name, None)
        self._unready(held.key)

    def _unpark(self, target: str, key: str, holder: dict[str, Item], interaction: Interaction) -> list[Fate]:
        """Hand over what waited for a target; what had expired before the target was there stays expired."""
        fates: list[Fate] = []
        for name, item in self.parked.pop(target).items():
            if interaction.ended > item.feedback.received + self.job.online.match_ttl_s:
                fates += self._expired(item, interaction.ended)
                continue
            found = max(interaction.ended, item.feedback.received)
            fates += self._hold(self._items[name], key, holder, interaction.key_id, found)
        return fates

    def _excluded(self, name: str, reason: str, interaction: Interaction) -> list[Fate]:
        """A turn is no part of its episode, nor is what waited for it."""
        self._decide(name, reason)
        self.refusals.add({name: reason}, interaction.ended)
        return self.reject(self.parked.pop(name), reason, interaction.ended)

    def _retract(self, seq: int, item: Feedback, now: float) -> list[Fate]:
        name = canonical(str(item.body.get("feedback", "")))
        if name in self.verdicts:
            return self._close(item.id, fate(item.id, "rejected", self.verdicts.kept_from(name), now))
        fates = self._close(item.id, fate(item.id, "retracted", f"retracts {name}", now))
        if name not in self._items:  # it overtook what it retracts
            given_up = self._overtaken.put(name, seq, item)
            return fates + ([fate(given_up, "expired", PARKED, now)] if given_up else [])
        self._detach(name)
        return [*self._close(name, fate(name, "retracted", f"by {item.id}", now)), *fates]

    def _changed(self, version: int, now: float) -> set[str]:
        """Episodes that must be settled anew though nothing came: the policy, time or a user of theirs moved on."""
        low, high = sorted((self._swept, version))
        found = {name for at, names in self._at_version.items() if low < at <= high for name in names}
        found = (found | self._between) & self.episodes.keys()
        self._between.clear()
        self._swept = version
        for at in [at for at in self._at_version if at < version - self.job.train.max_lag - 1]:
            del self._at_version[at]  # versions go back by what is sealed and refused, and no further
        found.update(self._due.pop_until(now))
        return found | {key for key in self.ready if any(map(self._opted_out, self.episodes[key].users))}

    def _watch(self, key: str, seq: int, interaction: Interaction) -> None:
        """An episode has this record now, which stands at ``seq``."""
        self._read.put(seq, key)
        for version in self._versions(interaction):
            self._at_version.setdefault(version, {})[key] = None

    def _versions(self, interaction: Interaction) -> set[int]:
        """At which an answer becomes too old, and from which on its newest token is one that the ledger knows."""
        versions = [span.version for span in interaction.spans] or [0]
        return {min(versions) + self.job.train.max_lag + 1, max(versions)}

    def _is_read_at(self, seq: float, key: str) -> bool:
        return key in self.episodes and any(turn.seq == seq for turn in self.episodes[key].turns)

    def _is_said_at(self, seq: float, name: str) -> bool:
        return name in self._items and self._items[name].item.seq == seq

    def _is_due_at(self, due: float, key: str) -> bool:
        return key in self.episodes and key not in self.ready and self.episodes[key].due == due

    def _is_expiring(self, received: float, name: str) -> bool:
        """True if an item that was received then still has no target, or no record of one."""
        held = self._items.get(name)
        if held is None or held.item.feedback.received != received:
            return False
        if held.holder is None:
            return True
        return held.holder is self.offers.items and bool(self.offers.missing(held.item.feedback))

    def _settle(self, key: str, version: int, now: float) -> list[Fate]:
        episode = self.episodes[key]
        self.ready.pop(key, None)
        outcome = episode.settle(self.job, version=version, now=now)
        earned = None if outcome is None or any(map(self._opted_out, episode.users)) else outcome.earned
        self.trials.take(canonical(episode.turns[0].interaction.id), earned)
        if outcome is None:
            if episode.due < math.inf:
                self._due.put(episode.due, key)
            return []
        outcome = outcome.without(self._opted_out, self.job.online.without_consent)
        if good := outcome.trajectories:
            self.ready[key] = [replace(good[0], refused=outcome.reasons), *good[1:]]
            return []
        return self._refuse(key, outcome.refused[-1][1], now, outcome.reasons)

    def _refuse(self, key: str, reason: str, now: float, reasons: Mapping[str, str] | None = None) -> list[Fate]:
        """An episode is never trained on; ``reasons``: of its turns, where they have their own."""
        episode = self.episodes[key]
        why = reasons_of(episode.turns, reason) | dict(reasons or {})
        self.refusals.add(why, now)
        said = dict.fromkeys(episode.items, reason)
        said |= {name: why[canonical(turn.interaction.id)] for turn in episode.turns for name in turn.items}
        fates = [one for name, due in said.items() for one in self._close(name, fate(name, "rejected", due, now))]
        self._forget(key, reason)
        self.verdicts.targets.update(why)
        return fates

    def _relieve(self, now: float) -> list[Fate]:
        """Give up what can never be taken in time, and what nobody can hold."""
        fates: list[Fate] = []
        most = most_ready(self.job.max_draws)
        if len(self.ready) > most:
            oldest = sorted(self.ready.items(), key=lambda one: min(trajectory.first for trajectory in one[1]))
            for name in crowded(((found[0].owners.judges[0], name) for name, found in oldest), most):
                fates += self._refuse(name, CROWDED, now)
        if len(self.episodes) > MAX_WAITING:
            for name in crowded(((episode.asker, name) for name, episode in self.episodes.items()), MAX_WAITING):
                fates += self._refuse(name, CROWDED, now)
        return fates

    def _expire(self, now: float) -> list[Fate]:
        limit = now - self.job.online.match_ttl_s
        unmet = [fate(name, "expired", "unknown_target", now) for name in self._overtaken.expire(limit)]
        late = [self._items[name].item for name in self._expiring.pop_until(limit, inclusive=False)]
        self.offers.let_go()
        return unmet + [one for item in late for one in self._expired(item, now)]

    def _expired(self, item: Item, now: float, reason: str = "unknown_target") -> list[Fate]:
        return self._close(item.feedback.id, fate(item.feedback.id, "expired", reason, now))

    def _close(self, name: str, last: Fate, seq: int = 0) -> list[Fate]:
        """The last fate of an item that is not admitted; ``seq`` where it was not held."""
        self._shut(name, last.status, seq)
        return [last]

    def _shut(self, name: str, how: str, seq: int = 0) -> None:
        held = self._items.get(name)
        self._detach(name)
        self.verdicts.end(name, how, seq if held is None else max(seq, held.item.seq))

    def _unready(self, key: str) -> None:
        """Something changed about an episode: it is settled anew."""
        self.ready.pop(key, None)
        self._touched[key] = None

    def _forget(self, key: str, reason: str) -> None:
        """An episode is decided as a whole."""
        episode = self.episodes.pop(key, None)
        self.ready.pop(key, None)
        for turn in episode.turns if episode is not None else []:
            self.num_waiting -= 1
            self._unwatch(key, turn.interaction)
            name = canonical(turn.interaction.id)
            if name in self._places:
                self._decide(name, reason)
            episode_id = episode_of(turn.interaction)
            if self._places.get(episode_id) == key:
                self._decide(episode_id, reason)
        self._decide(key, reason)

    def _unwatch(self, key: str, interaction: Interaction) -> None:
        for version in self._versions(interaction):
            keys = self._at_version.get(version, {})
            keys.pop(key, None)
            if not keys:
                self._at_version.pop(version, None)

    def _decide(self, name: str, reason: str) -> None:
        self._places.pop(name, None)
        self.verdicts.targets[name] = reason


def _compact(interaction: Interaction) -> Interaction:
    """The same with its numbers side by side, 16 bytes for a token instead of about 80, and without its texts."""
    try:
        return msgspec.structs.replace(
            interaction, prompt_ids=array("i", interaction.prompt_ids), token_ids=array("i", interaction.token_ids),
            logprobs=array("d", interaction.logprobs), text="", prompt="",
        )  # fmt: skip
    except (OverflowError, TypeError):  # no model has such tokens: what refuses it finds them as they are
        return interaction
