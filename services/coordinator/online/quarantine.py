"""Holds feedback that is unusual for its source until a user releases or drops it. Pure.

The quarantine filters items between the stream and ``Matching``, so held items have no effect. Which items it holds
depends only on the stream, and the ledger records the held items before any decision that leaves them out. So a leader
that reads the stream again holds the same items.

Two rules apply, each to one source (API key) and metric:

- A float is an outlier if its distance from the median exceeds ``max_deviation`` times 1.4826 MAD (the median absolute
  deviation, scaled to estimate the standard deviation of a normal distribution; Hampel 1974).
- A source drifts while its exponentially weighted moving average is further from its usual mean than ``max_drift``
  standard deviations of that average, sigma sqrt(w / (2 - w)) (EWMA control chart; Roberts 1959).

The share of a boolean metric is estimated with two values of each kind added (Agresti and Coull 1998), so that a value
is not unusual merely because it never occurred before.

Usual values are learned only from accepted feedback, so rejected feedback shifts nothing. The moving average takes
every value but outliers, so that a source that returns to normal is accepted again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.services.coordinator.online.admission import out_of_range
from penstock.services.coordinator.online.statuses import feedback_status, quarantine_rejections
from penstock.services.coordinator.online.turns import MAX_SEQ, FeedbackItem
from penstock.services.coordinator.training.decision import Draft
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.quarantine import QuarantineConfig
from penstock.shared.protocol.events import Quarantined
from penstock.shared.protocol.live.interaction import Erasure, Feedback, FeedbackStatus, bare_id

__all__ = ["DECIDING", "Outliers", "Quarantine", "Window"]

MAD_TO_SIGMA = 1.4826
SMALLEST_SHARE = 0.02
"""Smallest standard deviation that is assumed, as a share of the metric's range. Without this minimum, any value that
follows many equal values and differs from them would be unusual."""
MAX_SERIES = 20_000
"""Maximum number of pairs of source and metric in memory; above this the pair used least recently is dropped."""


class Window:
    """The newest ``size`` values of a series, with running statistics.

    Adding a value costs a binary search and a shift, a query at most a binary search.
    """

    def __init__(self, size: int) -> None:
        self._newest: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []
        self._sum = self._squares = 0.0
        self._since = 0
        """Number of values added since the sums were recomputed; recomputing removes accumulated rounding errors."""

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        """Add a value, and drop the oldest one from a full window."""
        if len(self._newest) == self._newest.maxlen:
            oldest = self._newest[0]
            del self._ordered[bisect_left(self._ordered, oldest)]
            self._sum, self._squares = self._sum - oldest, self._squares - oldest * oldest
        self._newest.append(value)
        insort(self._ordered, value)
        self._sum, self._squares, self._since = self._sum + value, self._squares + value * value, self._since + 1
        if self._since >= (self._newest.maxlen or 1):
            self._sum, self._since = math.fsum(self._newest), 0
            self._squares = math.fsum(one * one for one in self._newest)

    @property
    def sum(self) -> float:
        """Sum of all values."""
        return self._sum

    @property
    def mean(self) -> float:
        """Mean of the values; there must be at least one."""
        return self._sum / len(self)

    @property
    def deviation(self) -> float:
        """Standard deviation of the values; there must be at least one."""
        return math.sqrt(max(0.0, self._squares / len(self) - self.mean**2))

    @property
    def median(self) -> float:
        """Median of the values; there must be at least one."""
        half = len(self) // 2
        middle = self._ordered[half]
        return middle if len(self) % 2 else (self._ordered[half - 1] + middle) / 2

    @property
    def mad(self) -> float:
        """Median absolute deviation from the median; there must be at least one value."""
        centre, half = self.median, len(self) // 2
        upper = self._distance(centre, half + 1)
        return upper if len(self) % 2 else (self._distance(centre, half) + upper) / 2

    def _distance(self, centre: float, count: int) -> float:
        """Return the smallest distance from ``centre`` within which at least ``count`` values lie."""
        values, low, high = self._ordered, 0, len(self._ordered) - count
        while low < high:
            middle = (low + high) // 2
            if centre - values[middle] > values[middle + count] - centre:
                low = middle + 1
            else:
                high = middle
        return max(centre - values[low], values[low + count - 1] - centre)


@dataclass(slots=True)
class _Series:
    usual: Window
    average: float = math.nan


class Outliers:
    """Detects unusual values by statistics of each source and metric. Values must come in the order of the stream."""

    def __init__(self, config: QuarantineConfig) -> None:
        self._config = config
        self._series: OrderedDict[tuple[str, str], _Series] = OrderedDict()

    def judge(self, source: str, metric: str, value: bool | float, span: float) -> str:
        """Return the reason why the next value of a source is unusual; learn a usual value, and return '' for it.

        Args:
            span: largest difference between two values of the metric.
        """
        series, number = self._of(source, metric), float(value)
        is_known = len(series.usual) >= self._config.min_items
        if is_known and (reason := self._deviation(series, value, span)):
            return reason
        before = series.average
        series.average = number if math.isnan(before) else before + self._config.smoothing * (number - before)
        if is_known and (reason := self._drift(series, value, span)):
            return reason
        series.usual.add(number)
        return ""

    def learn(self, source: str, metric: str, value: bool | float) -> None:
        """Learn a value that a user released from quarantine."""
        self._of(source, metric).usual.add(float(value))

    def _of(self, source: str, metric: str) -> _Series:
        key = source, metric
        if key not in self._series:
            self._series[key] = _Series(Window(self._config.window))
            if len(self._series) > MAX_SERIES:
                self._series.popitem(last=False)
        self._series.move_to_end(key)
        return self._series[key]

    def _deviation(self, series: _Series, value: bool | float, span: float) -> str:
        if isinstance(value, bool):  # either boolean is usual by itself; only their share can drift
            return ""
        median = series.usual.median
        sigma = max(MAD_TO_SIGMA * series.usual.mad, SMALLEST_SHARE * span)
        far = abs(value - median) / sigma
        if far <= self._config.max_deviation:
            return ""
        return f"outlier: {value:.4g} is {far:.1f} deviations from the median {median:.4g}"

    def _drift(self, series: _Series, value: bool | float, span: float) -> str:
        weight = self._config.smoothing
        if isinstance(value, bool):
            mean = (series.usual.sum + 2) / (len(series.usual) + 4)
            sigma = math.sqrt(mean * (1 - mean))
        else:
            mean = series.usual.mean
            sigma = max(series.usual.deviation, SMALLEST_SHARE * span)
        far = abs(series.average - mean) / (sigma * math.sqrt(weight / (2 - weight)))
        if far <= self._config.max_drift:
            return ""
        return f"drift: the moving average {series.average:.4g} is {far:.1f} deviations from the mean {mean:.4g}"


PassOn = Callable[[int, Feedback, float], list[FeedbackStatus]]
"""Callback for items that are not held: (stream sequence number, item, time of reading)."""
DECIDING = frozenset({"release", "drop"})
"""Kinds of feedback by which a user decides on a held item."""
MAX_HELD = 10_000
"""Maximum held items; above this the oldest one is rejected."""
MAX_JUDGED = 100_000
"""Maximum number of items whose newest judged revision is remembered; also of rejected items that are remembered."""


class Quarantine:
    """Feedback of one job that is held in quarantine; empty if the job has no `online.quarantine`."""

    def __init__(self, job: OnlineJob, pass_on: PassOn) -> None:
        self._job, self._pass_on = job, pass_on
        self._config = job.online.quarantine
        self._outliers = Outliers(self._config or QuarantineConfig())
        self._held: OrderedDict[str, FeedbackItem] = OrderedDict()
        self._recorded: dict[str, int] = {}
        """Item that the ledger has recorded as held, even if it was released later -> stream sequence number of the
        recorded revision."""
        self._consumed: frozenset[str] = frozenset()
        self._rejected: OrderedDict[str, float] = OrderedDict()
        """Rejected item -> time: revisions received up to that time are ignored, later revisions are judged anew."""
        self._judged: OrderedDict[str, int] = OrderedDict()
        """Item -> newest revision that was judged."""
        self._released: set[str] = set()
        """Items whose release was read before the items, because a user's deletion had copied them to a later
        message."""

    def restore(self, state: LedgerState) -> None:
        """Restore the held and the rejected items that the ledger records."""
        self._rejected = OrderedDict(quarantine_rejections(state))
        self._recorded, self._consumed = dict(state.quarantined), frozenset(state.used)

    @property
    def is_enabled(self) -> bool:
        """True if the job has a quarantine."""
        return self._config is not None

    @property
    def num_held(self) -> int:
        """Number of held items."""
        return len(self._held)

    @property
    def lowest_seq(self) -> int:
        """Lowest stream sequence number of a held item's message, or ``MAX_SEQ`` if no item is held."""
        return min((item.seq for item in self._held.values()), default=MAX_SEQ)

    def __iter__(self) -> Iterator[Feedback]:
        """Iterate over the held items."""
        return (item.feedback for item in self._held.values())

    # -- facts ---------------------------------------------------------------------------------------------------------

    def learn(self, item: Feedback) -> None:
        """Learn the value of an item on which an earlier leader decided, for the statistics of its source."""
        if self._config is not None:
            self._judge(item)

    def on_feedback(self, seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        """Hold an unusual item of feedback, or pass on a usual one; return the statuses that result."""
        if item.kind in DECIDING:
            return self._decide(item, now)
        if item.kind == "retraction" or self._config is None:
            released = self._release_retracted(item, now) if item.kind == "retraction" else []
            return released + self._pass_on(seq, item, now)
        waiting = self._held.get(item.id)
        if waiting is not None and not waiting.is_revised_by(item):
            if waiting.is_copied_in(seq, item):
                self._held[item.id] = FeedbackItem(seq, item)  # the copy names its earlier stream sequence number
            return []
        reason = self._judge(item)
        if item.received <= self._rejected.get(item.id, -math.inf):
            return []
        is_released, is_recorded = item.id in self._released, self._is_recorded(seq, item)
        if is_released:
            self._released.discard(item.id)
            if reason:
                self._learn_released(item)
        if is_released or item.id in self._consumed or not (reason or is_recorded):
            self._held.pop(item.id, None)
            self._recorded.pop(item.id, None)  # the new revision replaces it
            return self._pass_on(seq, item, now)
        return self._hold(seq, item, "" if is_recorded else reason, now)

    def _is_recorded(self, seq: int, item: Feedback) -> bool:
        """Return True if the ledger records the revision ``item`` as held.

        A first revision with a higher stream sequence number than the recorded one is a copy, stored again when a
        user's data was deleted from the message. It counts as recorded.
        """
        recorded = self._recorded.get(item.id)
        return recorded is not None and (seq <= recorded or not item.revision)

    def on_erasure(self, erasure: Erasure) -> None:
        """Drop the held feedback that ``erasure`` (the deletion of a user's data) lists."""
        for name in erasure.feedback:
            self._held.pop(bare_id(name) or name, None)
            self._released.discard(bare_id(name) or name)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def draft(self, draft: Draft) -> None:
        """Add to ``draft`` the held items that the ledger does not record yet; call this before other data is
        admitted."""
        known = draft.state.quarantined
        new = {name: item.seq for name, item in self._held.items() if known.get(name) != item.seq}
        if new:
            draft.add(Quarantined(writer_epoch=draft.run.writer_epoch, time=draft.now, items=new))

    def sweep(self, now: float) -> list[FeedbackStatus]:
        """Reject the items held for too long; return their statuses."""
        if self._config is None:
            return []
        limit = now - self._config.hold_s
        late = [name for name, item in self._held.items() if item.feedback.received < limit]
        return [self._reject(name, "quarantine_expired", now) for name in late]

    def reject_older_half(self, now: float) -> list[FeedbackStatus]:
        """Reject the older half of the held items, which keep FEEDBACK from being purged; return their statuses."""
        names = sorted(self._held, key=lambda name: self._held[name].seq)
        return [self._reject(name, "quarantine_full", now) for name in names[: (len(names) + 1) // 2]]

    def on_job_end(self, now: float) -> list[FeedbackStatus]:
        """Reject all held items; return their statuses."""
        return [self._reject(name, "job_ended", now) for name in list(self._held)]

    # -- internals -----------------------------------------------------------------------------------------------------

    def _judge(self, item: Feedback) -> str:
        """Return the reason to hold an item, or '' if its value is usual or this revision was judged before."""
        metric = self._job.online.metric(item.metric)
        if metric is None or item.kind != "metric" or not isinstance(item.value, bool | int | float):
            return ""
        if self._judged.get(item.id, -1) >= item.revision or out_of_range(item, self._job.online):
            return ""
        self._judged[item.id] = item.revision
        if len(self._judged) > MAX_JUDGED:
            self._judged.popitem(last=False)
        span = 1.0 if metric.type == "boolean" else (metric.clip[1] - metric.clip[0]) / (abs(metric.weight) or 1.0)
        return self._outliers.judge(item.key_id, item.metric, item.value, span)

    def _hold(self, seq: int, item: Feedback, reason: str, now: float) -> list[FeedbackStatus]:
        """Hold an item, and return the statuses to publish. ``reason`` is '' if the status `quarantined` of this item
        was already published; it is not published again."""
        self._held[item.id] = FeedbackItem(seq, item)
        statuses = [feedback_status(item.id, "quarantined", reason, now)] if reason else []
        if len(self._held) > MAX_HELD:
            statuses.append(self._reject(next(iter(self._held)), "quarantine_full", now))
        return statuses

    def _decide(self, item: Feedback, now: float) -> list[FeedbackStatus]:
        name = bare_id(str(item.body.get("feedback", ""))) or ""
        held = self._held.get(name)
        if held is None:
            if item.kind == "release" and len(self._released) < MAX_HELD:
                self._released.add(name)
            return []
        if item.kind == "drop":
            return [self._reject(name, "quarantine_dropped", now)]
        released = self._held.pop(name).feedback
        self._learn_released(released)
        self._recorded.pop(name, None)
        return self._pass_on(held.seq, released, now)

    def _release_retracted(self, item: Feedback, now: float) -> list[FeedbackStatus]:
        """Pass on the held item that a retraction names, so that ``Matching`` gets the item before its retraction."""
        name = bare_id(str(item.body.get("feedback", ""))) or ""
        retracted = self._held.pop(name, None)
        if retracted is None:
            return []
        self._recorded.pop(name, None)
        return self._pass_on(retracted.seq, retracted.feedback, now)

    def _learn_released(self, item: Feedback) -> None:
        if isinstance(item.value, bool | int | float):
            self._outliers.learn(item.key_id, item.metric, item.value)

    def _reject(self, name: str, reason: str, now: float) -> FeedbackStatus:
        """Reject a held item; return its status. The leader ignores later copies of this revision, but judges later
        revisions."""
        self._rejected[name] = self._held.pop(name).feedback.received
        if len(self._rejected) > MAX_JUDGED:
            self._rejected.popitem(last=False)
        return feedback_status(name, "rejected", reason, now)
