"""Feedback that is unlike what its source said before waits here until somebody releases or drops it. Pure.

It stands between the stream of feedback and the matching, so that what is held has no effect at all. Which items are
held follows from the stream alone, and stands in the ledger before any decision without them: a leader that reads the
stream again holds the same ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from penstock.services.coordinator.decision import Draft
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.admission import out_of_range
from penstock.services.coordinator.online.credit import Item
from penstock.services.coordinator.online.fates import fate
from penstock.services.coordinator.online.outliers import Outliers
from penstock.services.coordinator.online.recalled import NOTHING, Told
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.config.quarantine import QuarantineConfig
from penstock.shared.protocol.events import Quarantined
from penstock.shared.protocol.interaction import Erasure, Fate, Feedback, bare_id

__all__ = ["DECIDING", "Quarantine"]

PassOn = Callable[[int, Feedback, float], list[Fate]]
"""What takes the items that are not held: sequence, item, time of reading."""

DECIDING = frozenset({"release", "drop"})
"""Kinds of feedback that decide on an item which is held."""
UNKNOWN = 1 << 62
"""Above every sequence."""
MAX_HELD = 10_000
"""Items that wait; beyond, the oldest one is rejected."""
REMEMBERED = 100_000
"""Items that are judged once, however often they are read."""


class Quarantine:
    """What is held of one job; without `online.quarantine` everything is passed on."""

    def __init__(self, job: OnlineJob, pass_on: PassOn) -> None:
        self._job, self._pass_on = job, pass_on
        self._config = job.online.quarantine
        self._outliers = Outliers(self._config or QuarantineConfig())
        self._held: OrderedDict[str, Item] = OrderedDict()
        self._recorded: dict[str, int] = {}
        """Held according to the ledger, released or not; the sequences of what they said then."""
        self._used: frozenset[str] = frozenset()
        self._let_go: OrderedDict[str, float] = OrderedDict()
        """Rejected, and when it was said, or an earlier leader let it go: what was said by then is over."""
        self._judged: OrderedDict[str, int] = OrderedDict()
        """Item -> its newest revision that was judged."""
        self._released: set[str] = set()
        """Released before they were read: a deletion stores the rest of its message anew, further on in the stream."""

    def recall(self, state: LedgerState, told: Told = NOTHING) -> None:
        """What the ledger says of items that may be read again, and what earlier leaders told."""
        self._let_go = OrderedDict(told.let_go)
        self._recorded, self._used = dict(state.quarantined), frozenset(state.used)

    @property
    def is_used(self) -> bool:
        """Whether the job holds anything back."""
        return self._config is not None

    @property
    def num_held(self) -> int:
        """Items that wait."""
        return len(self._held)

    @property
    def lowest(self) -> int:
        """Sequence below which nothing is held."""
        return min((item.seq for item in self._held.values()), default=UNKNOWN)

    def __iter__(self) -> Iterator[Feedback]:
        """What is held."""
        return (item.feedback for item in self._held.values())

    # -- facts -------------------------------------------------------------------------------------------------------

    def learn(self, item: Feedback) -> None:
        """An item that was decided before this leader: only what it says of its source counts."""
        if self._config is not None:
            self._judge(item)

    def on_feedback(self, seq: int, item: Feedback, now: float) -> list[Fate]:
        """An item was read: hold it back, or pass it on."""
        if item.kind in DECIDING:
            return self._decide(item, now)
        if item.kind == "retraction" or self._config is None:
            taken_back = self._take_back(item, now) if item.kind == "retraction" else []
            return [*taken_back, *self._pass_on(seq, item, now)]
        waiting = self._held.get(item.id)
        if waiting is not None and not waiting.is_revised_by(item):
            if waiting.is_again(seq, item):
                self._held[item.id] = Item(seq, item)  # which says where it stood before
            return []
        reason = self._judge(item)
        if item.received <= self._let_go.get(item.id, -math.inf):
            return []
        is_released, is_recorded = item.id in self._released, self._is_recorded(seq, item)
        if is_released:
            self._released.discard(item.id)
            if reason:
                self._learn_released(item)
        if is_released or item.id in self._used or not (reason or is_recorded):
            self._held.pop(item.id, None)
            self._recorded.pop(item.id, None)  # what its sender said before is over
            return self._pass_on(seq, item, now)
        return self._hold(seq, item, "" if is_recorded else reason, now)

    def _is_recorded(self, seq: int, item: Feedback) -> bool:
        """Whether the ledger says that this is held, and not only what its sender said before.

        The first word of an item may be found further on, where a deletion stored it anew.
        """
        recorded = self._recorded.get(item.id)
        return recorded is not None and (seq <= recorded or not item.revision)

    def on_erasure(self, erasure: Erasure) -> None:
        """A user's feedback does not exist any more."""
        for name in erasure.feedback:
            self._held.pop(bare_id(name) or name, None)
            self._released.discard(bare_id(name) or name)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def draft(self, draft: Draft) -> None:
        """Record what is held, before anything is decided without it."""
        known = draft.state.quarantined
        new = {name: item.seq for name, item in self._held.items() if known.get(name) != item.seq}
        if new:
            draft.add(Quarantined(writer_epoch=draft.run.writer_epoch, time=draft.now, items=new))

    def sweep(self, now: float) -> list[Fate]:
        """Reject what nobody looked at."""
        if self._config is None:
            return []
        limit = now - self._config.hold_s
        late = [name for name, item in self._held.items() if item.feedback.received < limit]
        return [self._reject(name, "quarantine_expired", now) for name in late]

    def give_way(self, now: float) -> list[Fate]:
        """Reject the older half of what is held, which keeps everything after it from being forgotten."""
        names = sorted(self._held, key=lambda name: self._held[name].seq)
        return [self._reject(name, "quarantine_full", now) for name in names[: (len(names) + 1) // 2]]

    def end(self, now: float) -> list[Fate]:
        """The job is over."""
        return [self._reject(name, "job_ended", now) for name in list(self._held)]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _judge(self, item: Feedback) -> str:
        """Why an item is held, judged once."""
        metric = self._job.online.metric(item.metric)
        if metric is None or item.kind != "metric" or not isinstance(item.value, bool | int | float):
            return ""
        if self._judged.get(item.id, -1) >= item.revision or out_of_range(item, self._job.online):
            return ""
        self._judged[item.id] = item.revision
        if len(self._judged) > REMEMBERED:
            self._judged.popitem(last=False)
        span = 1.0 if metric.type == "boolean" else (metric.clip[1] - metric.clip[0]) / (abs(metric.weight) or 1.0)
        return self._outliers.judge(item.key_id, item.metric, item.value, span)

    def _hold(self, seq: int, item: Feedback, reason: str, now: float) -> list[Fate]:
        """Hold an item back; without a ``reason`` that was told before."""
        self._held[item.id] = Item(seq, item)
        told = [fate(item.id, "quarantined", reason, now)] if reason else []
        if len(self._held) > MAX_HELD:
            told.append(self._reject(next(iter(self._held)), "quarantine_full", now))
        return told

    def _decide(self, item: Feedback, now: float) -> list[Fate]:
        name = bare_id(str(item.body.get("feedback", ""))) or ""
        held = self._held.get(name)
        if held is None:
            if item.kind == "release" and len(self._released) < MAX_HELD:
                self._released.add(name)
            return []
        if item.kind == "drop":
            return [self._reject(name, "quarantine_dropped", now)]
        said = self._held.pop(name).feedback
        self._learn_released(said)
        self._recorded.pop(name, None)
        return self._pass_on(held.seq, said, now)

    def _take_back(self, item: Feedback, now: float) -> list[Fate]:
        """What a retraction does to what is held: who takes the retraction must know what it takes back."""
        name = bare_id(str(item.body.get("feedback", ""))) or ""
        gone = self._held.pop(name, None)
        if gone is None:
            return []
        self._recorded.pop(name, None)
        return self._pass_on(gone.seq, gone.feedback, now)

    def _learn_released(self, item: Feedback) -> None:
        if isinstance(item.value, bool | int | float):
            self._outliers.learn(item.key_id, item.metric, item.value)

    def _reject(self, name: str, reason: str, now: float) -> Fate:
        """Nor does it count where a deletion stores it anew; its sender may still revise it."""
        self._let_go[name] = self._held.pop(name).feedback.received
        if len(self._let_go) > REMEMBERED:
            self._let_go.popitem(last=False)
        return fate(name, "rejected", reason, now)
