"""Interactions and feedback find each other, in whatever order they arrive. Pure: facts in, fates and trajectories out.

What is undecided lives here; what is decided stands in the ledger (admitted) or follows again from the same facts
(refused, expired), so a new leader that reads the two streams from where the ledger says is where the old one was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.admission import out_of_range
from penstock.services.coordinator.online.canary import Trials
from penstock.services.coordinator.online.credit import Held, Item, Trajectory, Turn
from penstock.services.coordinator.online.crowding import MAX_WAITING, crowded, most_ready
from penstock.services.coordinator.online.episode import CUT, Episode
from penstock.services.coordinator.online.fates import fate
from penstock.services.coordinator.online.material import targets_of
from penstock.services.coordinator.online.names import canonical, episode_of
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

CROWDED, ENDED, ERASED = "too_many_waiting", "job_ended", "erased"


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
        self._touched: set[str] = set()
        self._swept = -1
        """Version at the newest sweep of all."""
        self._next = (1, 1)

    def recall(self, state: LedgerState, told: Told = NOTHING) -> None:
        """What the ledger has admitted, as far as it still names it, and what earlier leaders told."""
        self.verdicts.recall(state, told)
        self.offers.recall(state, told.over)

    # -- what others ask ---------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Interactions without a decision."""
        return sum(len(episode.turns) for episode in self.episodes.values())

    def lowest(self, without: Iterable[str] = ()) -> tuple[int, int]:
        """Sequences below which everything is decided once the episodes ``without`` are, too."""
        gone = set(without)
        left = [episode.lowest for name, episode in self.episodes.items() if name not in gone]
        offered = [item.seq for name, item in self.offers.items.items() if name not in gone]
        alone = [*offered, *(item.seq for item in self.parked), *self._overtaken.seqs]
        return min([self._next[0], *(low for low, _ in left)]), min([self._next[1], *(low for _, low in left), *alone])

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
        self._touched.update(self.offers.met(seq, interaction))
        name, episode_id = canonical(interaction.id), episode_of(interaction)
        if name in self._places:
            if self.episodes[self._places[name]].complete(seq, interaction):
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
        episode = self.episodes.setdefault(key, Episode(single))
        turn = Turn(seq, interaction)
        episode.add(turn)
        self._places[name] = key
        if interaction.index == 0:
            self._places[episode_id] = key
            self.verdicts.targets.forget(episode_id)
        self._touched.add(key)
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
        reason = reason or (ERASED if any(self.verdicts.targets.get(one) == ERASED for one in targets_of(item)) else "")
        if reason:
            return self._close(item.id, fate(item.id, "rejected", reason, now), seq)
        known = self._items.get(item.id)
        if known is not None:
            if known.item.is_again(seq, item):
                self._move(seq, known)
            if not known.item.is_revised_by(item):
                return []
            self._detach(item.id)
        # No reward depends on what is left out of one that is no material.
        bare = msgspec.structs.replace(item, body={}, tags={}, fingerprint="", seq=item.seq or seq)
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
            self._unready(key)
        else:
            self._forget(key, ERASED)
        return self.reject(said, ERASED, now)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def sweep(self, *, version: int, now: float, newest: int | None = None, everything: bool = True) -> list[Fate]:
        """Settle what can be settled, refuse what can never be trained, expire what found no target.

        Args:
            version: policy version from which the next update starts.
            newest: version that exists; None: that one.
            everything: look at all episodes, not only at those that changed (time passes, versions rise).
        """
        fates: list[Fate] = []
        names = [name for name in self._touched if name in self.episodes]
        if everything:
            names = [name for name in self.episodes if name in self._touched or self._may_change(name, version, now)]
            self._swept = version
        offered = [name for name in self.offers.items if everything or name in self._touched]
        self._touched.clear()
        for name in names:
            fates += self._settle(name, version, now)
        known = version if newest is None else newest
        settled = self.offers.settle(offered, version=version, newest=known, now=now, opted_out=self._opted_out)
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
        self._touched.add(item.id)
        matched = fate(item.id, "matched", "", now)
        return [matched, *self.reject(self.offers.holdings.excess(item.key_id), CROWDED, now)]

    def _attach(self, item: Item, now: float) -> list[Fate]:
        feedback = item.feedback
        target = canonical(feedback.inference or feedback.episode)
        if target in self.verdicts.targets:
            return self._close(feedback.id, fate(feedback.id, "rejected", self.verdicts.targets[target], now), item.seq)
        held = self._items[feedback.id] = Held(item, target)
        key = self._places.get(target)
        if key is None:
            oldest = self.parked.put(target, item)
            return [] if oldest is None else self._expired(oldest, now, "too_many_parked")
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
        if held.holder is None:
            self.parked.put(held.target, held.item)
        elif held.key:
            self._unready(held.key)
        else:
            self.offers.move(held.item)
            self._touched.add(held.item.feedback.id)

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
            self._overtaken.put(name, seq, item)
            return fates
        self._detach(name)
        return [*self._close(name, fate(name, "retracted", f"by {item.id}", now)), *fates]

    def _may_change(self, key: str, version: int, now: float) -> bool:
        """Whether an episode that nothing was said of must be settled anew: the policy, time or its user moved on."""
        episode = self.episodes[key]
        if version != self._swept:
            return True
        return any(map(self._opted_out, episode.users)) if key in self.ready else now >= episode.due

    def _settle(self, key: str, version: int, now: float) -> list[Fate]:
        episode = self.episodes[key]
        self.ready.pop(key, None)
        outcome = episode.settle(self.job, version=version, now=now)
        earned = None if outcome is None or any(map(self._opted_out, episode.users)) else outcome.earned
        self.trials.take(canonical(episode.turns[0].interaction.id), earned)
        if outcome is None:
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
        ready = ((found[0].owners.judges[0], name) for name, found in self.ready.items())
        for name in crowded(ready, most_ready(self.job.max_draws)):
            fates += self._refuse(name, CROWDED, now)
        if len(self.episodes) > MAX_WAITING:
            for name in crowded(((episode.asker, name) for name, episode in self.episodes.items()), MAX_WAITING):
                fates += self._refuse(name, CROWDED, now)
        return fates

    def _expire(self, now: float) -> list[Fate]:
        limit = now - self.job.online.match_ttl_s
        unmet = [fate(name, "expired", "unknown_target", now) for name in self._overtaken.expire(limit)]
        items = [item for item in (*self.parked, *self.offers.lonely()) if item.feedback.received < limit]
        return unmet + [one for item in items for one in self._expired(item, now)]

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
        self._touched.add(key)

    def _forget(self, key: str, reason: str) -> None:
        """An episode is decided as a whole."""
        episode = self.episodes.pop(key, None)
        self.ready.pop(key, None)
        for turn in episode.turns if episode is not None else []:
            name = canonical(turn.interaction.id)
            if name in self._places:
                self._decide(name, reason)
            episode_id = episode_of(turn.interaction)
            if self._places.get(episode_id) == key:
                self._decide(episode_id, reason)
        self._decide(key, reason)

    def _decide(self, name: str, reason: str) -> None:
        self._places.pop(name, None)
        self.verdicts.targets[name] = reason
