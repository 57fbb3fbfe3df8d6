"""Interactions and feedback find each other, in whatever order they arrive. Pure: facts in, fates and trajectories out.

What is undecided lives here; what is decided stands in the ledger (admitted) or follows again from the same facts
(refused, expired), so a new leader that reads the two streams from where the ledger says is where the old one was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.admission import out_of_range
from penstock.services.coordinator.online.credit import Item, Trajectory, Turn
from penstock.services.coordinator.online.episode import UNKNOWN, Episode
from penstock.services.coordinator.online.fates import fate
from penstock.services.coordinator.online.parked import Parked
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import Erasure, Fate, Feedback, Interaction, bare_id

__all__ = ["Matching"]

REMEMBERED = 100_000
"""Decided interactions and episodes whose late feedback is told apart from feedback on unknown ones."""
TEXTS = frozenset({"comment", "demonstration"})
"""Names of feedback that is text: no reward by itself."""
CONSUMED = "late_after_training"


@dataclass(slots=True)
class _Held:
    """An undecided item and where it is: with its ``holder`` (a turn or an episode, ``key``), or parked without one."""

    item: Item
    target: str
    key: str = ""
    holder: dict[str, Item] | None = None


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
        self._parked = Parked()
        self._places: dict[str, str] = {}
        """Undecided interaction, or another name of an episode -> its episode."""
        self._items: dict[str, _Held] = {}
        """Undecided feedback, by id."""
        self._retracted: dict[str, tuple[int, Feedback]] = {}
        """Feedback whose retraction overtook it, by id."""
        self._decided: OrderedDict[str, str] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._touched: set[str] = set()
        self._next = (1, 1)

    def recall(self, state: LedgerState) -> None:
        """What the ledger has admitted, as far as it still names it."""
        for admission in state.admissions.values():
            self._decided.update(dict.fromkeys(admission.interactions, CONSUMED))
            self._closed.update(dict.fromkeys(admission.feedback))
        self._decided.update(dict.fromkeys(state.consumed, CONSUMED))
        self._closed.update(dict.fromkeys(state.used))

    # -- what others ask ---------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Interactions without a decision."""
        return sum(len(episode.turns) for episode in self.episodes.values())

    @property
    def num_parked(self) -> int:
        """Items of feedback whose target is not known yet."""
        return len(self._parked)

    def lowest(self, without: Iterable[str] = ()) -> tuple[int, int]:
        """Sequences below which everything is decided once the episodes ``without`` are, too."""
        gone = set(without)
        left = [episode.lowest for name, episode in self.episodes.items() if name not in gone]
        interactions = min((low for low, _ in left), default=UNKNOWN)
        feedback = min((low for _, low in left), default=UNKNOWN)
        parked = min((item.seq for item in self._parked), default=UNKNOWN)
        parked = min([parked, *(seq for seq, _ in self._retracted.values())])
        return min(interactions, self._next[0]), min(feedback, parked, self._next[1])

    def ended(self, admissions: Iterable[Admission]) -> list[float]:
        """When the last answer of each was given; these are not taken yet."""
        found = []
        for admission in admissions:
            key = self._places.get(list(admission.interactions)[-1], "")
            found.append(self.episodes[key].last_active if key in self.episodes else admission.time)
        return found

    # -- facts -------------------------------------------------------------------------------------------------------

    def on_interaction(self, seq: int, interaction: Interaction) -> list[Fate]:
        """A record was read. Feedback that waited for it is matched now."""
        self._next = (max(self._next[0], seq + 1), self._next[1])
        name, episode_id = _canonical(interaction.id), _episode_of(interaction)
        if name in self._places:
            return []
        if name in self._decided:
            if self._decided[name] == CONSUMED and interaction.index == 0 and episode_id not in self._places:
                self._decide(episode_id, CONSUMED)
            return []
        single = interaction.alone or interaction.index > 0 or not self._has_credit
        key = name if single else episode_id
        if key in self._decided:  # its episode was over
            self._decide(name, "episode_over")
            return self._late(name, interaction.ended)
        episode = self.episodes.setdefault(key, Episode(single))
        turn = Turn(seq, interaction)
        episode.add(turn)
        self._places[name] = key
        if interaction.index == 0:
            self._places[episode_id] = key
            self._decided.pop(episode_id, None)
        self._touched.add(key)
        fates = self._unpark(name, key, turn.items, interaction)
        return fates + (self._unpark(episode_id, key, episode.items, interaction) if interaction.index == 0 else [])

    def on_feedback(self, seq: int, item: Feedback, now: float) -> list[Fate]:
        """An item was read."""
        self._next = (self._next[0], max(self._next[1], seq))  # a message holds several items
        if item.id in self._closed:
            return []
        if item.kind == "retraction":
            return self._retract(seq, item, now)
        if item.id in self._retracted:
            by = self._retracted.pop(item.id)[1].id
            return self._close(item.id, fate(item.id, "retracted", f"by {by}", now))
        reason = _off_policy(item) or ("out_of_range" if out_of_range(item, self.job.online.metrics) else "")
        if reason:
            return self._close(item.id, fate(item.id, "rejected", reason, now))
        known = self._items.get(item.id)
        if known is not None:
            said = known.item.feedback
            if item.revision <= said.revision or item.key_id != said.key_id:  # nobody revises what others said
                return []
            self._detach(item.id)
        bare = msgspec.structs.replace(item, body={}, tags={}, fingerprint="")  # no reward depends on these
        return self._attach(Item(seq, bare), now)

    def on_erasure(self, erasure: Erasure) -> None:
        """A user's interactions and feedback do not exist any more."""
        for name in map(_canonical, erasure.feedback):
            self._detach(name)
            self._shut(name)
        for name in map(_canonical, erasure.interactions):
            key = self._places.pop(name, None)
            if key is not None and key in self.episodes:
                episode = self.episodes[key]
                episode.turns = [turn for turn in episode.turns if _canonical(turn.interaction.id) != name]
                self._unready(key)
            self._decide(name, "erased")

    # -- decisions ---------------------------------------------------------------------------------------------------

    def sweep(self, *, version: int, now: float, everything: bool = True) -> list[Fate]:
        """Settle what can be settled, refuse what can never be trained, expire what found no target.

        Args:
            version: policy version from which the next update starts.
            everything: look at all episodes, not only at those that changed (time passes, versions rise).
        """
        fates: list[Fate] = []
        names = list(self.episodes) if everything else [name for name in self._touched if name in self.episodes]
        self._touched.clear()
        for name in names:
            fates += self._settle(name, version, now)
        return fates + (self._expire(now) if everything else [])

    def take(self, admissions: Iterable[Admission]) -> None:
        """These stand in the ledger: their episodes are decided."""
        for admission in admissions:
            keys = {self._places[name] for name in admission.interactions if name in self._places}
            for name in admission.interactions:
                self._decide(name, CONSUMED)
            for name in admission.feedback:
                self._shut(name)
            for key in keys:
                self._forget(key, CONSUMED)

    def end(self, now: float) -> list[Fate]:
        """The job is over: nothing is admitted any more."""
        return [
            one for name in list(self._items) for one in self._close(name, fate(name, "rejected", "job_ended", now))
        ]

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _has_credit(self) -> bool:
        """Whether what is said of one turn, or of the whole, concerns other turns."""
        online = self.job.online
        return online.gamma > 0 or any(metric.level == "episode" for metric in online.metrics.values())

    def _attach(self, item: Item, now: float) -> list[Fate]:
        feedback = item.feedback
        target = _canonical(feedback.inference or feedback.episode)
        if target in self._decided:
            return self._close(feedback.id, fate(feedback.id, "rejected", self._decided[target], now))
        held = self._items[feedback.id] = _Held(item, target)
        key = self._places.get(target)
        if key is None:
            oldest = self._parked.put(target, item)
            return [] if oldest is None else self._expired(oldest, now, "too_many_parked")
        holder, asker = self._holder(target, key)
        return self._hold(held, key, holder, asker, now)

    def _hold(self, held: _Held, key: str, holder: dict[str, Item], asker: str, now: float) -> list[Fate]:
        """An item has found its target, which ``asker`` (a key) was served."""
        name = held.item.feedback.id
        if self.job.online.raters == "same_key" and held.item.feedback.key_id != asker:
            return self._close(name, fate(name, "rejected", "other_key", now))
        held.key, held.holder = key, holder
        holder[name] = held.item
        self._unready(key)
        return [fate(name, "matched", "", now, [held.target])]

    def _holder(self, target: str, key: str) -> tuple[dict[str, Item], str]:
        """What holds the feedback on a target, a turn or its whole episode, and the key that it was served to."""
        episode = self.episodes[key]
        turns = (turn for turn in episode.turns if _canonical(turn.interaction.id) == target)
        turn = next(turns, None)
        if turn is not None:
            return turn.items, turn.interaction.key_id
        return episode.items, episode.turns[0].interaction.key_id if episode.turns else ""

    def _detach(self, name: str) -> None:
        """Take an undecided item away from where it is: another turn may have the name of its target by now."""
        held = self._items.pop(name, None)
        if held is None:
            return
        if held.holder is None:
            self._parked.remove(held.target, name)
            return
        held.holder.pop(name, None)
        self._unready(held.key)

    def _unpark(self, target: str, key: str, holder: dict[str, Item], interaction: Interaction) -> list[Fate]:
        """Hand over what waited for a target; what had expired before the target was there stays expired."""
        fates: list[Fate] = []
        for name, item in self._parked.pop(target).items():
            if interaction.ended > item.feedback.received + self.job.online.match_ttl_s:
                fates += self._expired(item, interaction.ended)
                continue
            found = max(interaction.ended, item.feedback.received)
            fates += self._hold(self._items[name], key, holder, interaction.key_id, found)
        return fates

    def _late(self, target: str, now: float) -> list[Fate]:
        return [
            one
            for name in self._parked.pop(target)
            for one in self._close(name, fate(name, "rejected", self._decided[target], now))
        ]

    def _retract(self, seq: int, item: Feedback, now: float) -> list[Fate]:
        name = _canonical(str(item.body.get("feedback", "")))
        if name in self._closed:
            return self._close(item.id, fate(item.id, "rejected", CONSUMED, now))
        fates = self._close(item.id, fate(item.id, "retracted", f"retracts {name}", now))
        if name not in self._items:  # it overtook what it retracts
            self._retracted[name] = (seq, item)
            return fates
        self._detach(name)
        return [*self._close(name, fate(name, "retracted", f"by {item.id}", now)), *fates]

    def _settle(self, key: str, version: int, now: float) -> list[Fate]:
        episode = self.episodes[key]
        self.ready.pop(key, None)
        outcome = episode.settle(self.job, version=version, now=now)
        if outcome is None:
            return []
        out = [t for t in outcome.trajectories if any(self._opted_out(turn.interaction.user) for turn in t.turns)]
        good = [trajectory for trajectory in outcome.trajectories if trajectory not in out]
        if good:
            self.ready[key] = good
            return []
        reason = "opted_out" if out else outcome.refused[-1][1]
        names = [*episode.items, *(name for turn in episode.turns for name in turn.items)]
        fates = [one for name in names for one in self._close(name, fate(name, "rejected", reason, now))]
        self._forget(key, reason)
        return fates

    def _expire(self, now: float) -> list[Fate]:
        limit = now - self.job.online.match_ttl_s
        self._retracted = {name: one for name, one in self._retracted.items() if one[1].received >= limit}
        items = [item for item in self._parked if item.feedback.received < limit]
        return [one for item in items for one in self._expired(item, now)]

    def _expired(self, item: Item, now: float, reason: str = "unknown_target") -> list[Fate]:
        return self._close(item.feedback.id, fate(item.feedback.id, "expired", reason, now))

    def _close(self, name: str, last: Fate) -> list[Fate]:
        """The last fate of an item that is not admitted."""
        self._shut(name)
        return [last]

    def _shut(self, name: str) -> None:
        held = self._items.pop(name, None)
        if held is not None and held.holder is None:
            self._parked.remove(held.target, name)
        self._closed[name] = None
        if len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)

    def _unready(self, key: str) -> None:
        """Something changed about an episode: it is settled anew."""
        self.ready.pop(key, None)
        self._touched.add(key)

    def _forget(self, key: str, reason: str) -> None:
        """An episode is decided as a whole."""
        episode = self.episodes.pop(key, None)
        self.ready.pop(key, None)
        for turn in episode.turns if episode is not None else []:
            name = _canonical(turn.interaction.id)
            if name in self._places:
                self._decide(name, reason)
            episode_id = _episode_of(turn.interaction)
            if self._places.get(episode_id) == key:
                self._decide(episode_id, reason)
        self._decide(key, reason)

    def _decide(self, name: str, reason: str) -> None:
        self._places.pop(name, None)
        self._decided[name] = reason
        if len(self._decided) > REMEMBERED:
            self._decided.popitem(last=False)


def _canonical(text: str) -> str:
    """An id without its prefix; what is no id stays as it is."""
    return bare_id(text) or text


def _episode_of(interaction: Interaction) -> str:
    """The episode of an interaction. A name that an agent made up is one of its key: others may make up the same."""
    return bare_id(interaction.episode) or f"{interaction.key_id} {interaction.episode}"


def _off_policy(item: Feedback) -> str:
    """Why an item is not trained on here, where nothing recomputes, imitates or compares; '' for rewards."""
    if item.kind != "interaction":
        return "" if item.kind == "metric" and item.metric not in TEXTS else f"{item.metric or item.kind}_is_no_reward"
    body = item.body
    if not body.get("token_ids"):
        return "text_only"
    if body.get("logprobs"):
        return "posted_unverified"
    return "logprobs_missing" if body.get("policy_version") is not None else "behaviour_unknown"
