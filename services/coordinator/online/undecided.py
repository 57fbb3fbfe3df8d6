"""Holds undecided feedback, within memory bounds. Pure.

``LazyHeap`` finds the lowest of many values that change often, such as the next due time or the lowest stream sequence
number. The other classes hold feedback: all undecided items by id, unmatched ones by target, and retractions that
arrived before their item.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from penstock.services.coordinator.online.turns import FeedbackItem
from penstock.shared.protocol.live.interaction import Feedback

__all__ = [
    "MAX_PER_KEY",
    "MAX_RETRACTIONS",
    "MAX_UNMATCHED",
    "SLACK",
    "LazyHeap",
    "PendingRetractions",
    "UndecidedFeedback",
    "UnmatchedFeedback",
]

SLACK = 1024
"""Number of entries that a heap may have, beyond two for each of its names, before it is cleaned."""
CLEANED = 8
"""Number of entries that each push checks during cleaning; checking a million at once would block the event loop."""
MAX_PER_KEY = 50_000
"""Maximum unmatched items of one API key; above this its oldest ones are evicted."""
MAX_UNMATCHED = 1_000_000
"""Maximum unmatched items of all API keys; above this the oldest items of the key with the most items are evicted."""
EVICTED_AT_ONCE = 1_000
"""Number of items evicted at once when all keys together have too many."""
MAX_RETRACTIONS = 100_000
"""Maximum pending retractions; above this the oldest one is evicted."""

N = TypeVar("N", bound=Hashable)


class LazyHeap(Generic[N]):
    """A heap of ``(value, name)`` that drops an outdated entry when it reaches the top, or when the heap is cleaned.

    A push costs O(log n); finding the lowest value costs one pop for each outdated entry before it. The heap
    never holds more than about three entries for each of its names, plus ``SLACK``.

    Args:
        is_valid: returns True while ``value`` is still the value of ``name``.
        num_names: returns an upper bound of the number of names that have a value.
    """

    def __init__(self, is_valid: Callable[[float, N], bool], num_names: Callable[[], int]) -> None:
        self._is_valid, self._num_names = is_valid, num_names
        self._heap: list[tuple[float, N]] = []
        self._unclean: list[tuple[float, N]] = []
        """Heap of the entries that a cleaning has not checked yet; empty between cleanings. A checked entry moves to
        ``_heap`` if it is valid, and is dropped if it is outdated."""
        self._cleaned: set[tuple[float, N]] = set()

    def __len__(self) -> int:
        """Number of entries, outdated ones included."""
        return len(self._heap) + len(self._unclean)

    def put(self, value: float, name: N) -> None:
        """Set the value of a name; earlier entries of that name become outdated."""
        heappush(self._heap, (value, name))
        if self._unclean:
            self._clean()
        elif len(self._heap) > 2 * self._num_names() + SLACK:
            self._heap, self._unclean = [], self._heap

    def lowest(self, without: Container[N] = ()) -> float | None:
        """Return the lowest valid value of all names that are not in ``without``, or None if there is none."""
        passed, found = list[tuple[float, N]](), None
        while found is None and (heap := self._lower()):
            value, name = heap[0]
            if self._is_valid(value, name) and name not in without:
                found = value
                break
            entry = heappop(heap)
            if name in without:
                passed.append(entry)
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def pop_until(self, limit: float, *, inclusive: bool = True) -> Iterator[N]:
        """Remove and yield the names whose value is below ``limit`` (or equal to it, if ``inclusive``), lowest value
        first. Outdated entries are skipped."""
        while (heap := self._lower()) and (heap[0][0] < limit or (inclusive and heap[0][0] == limit)):
            entry = heappop(heap)
            while (heap := self._lower()) and heap[0] == entry:  # a caller put the same entry twice
                heappop(heap)
            if self._is_valid(*entry):
                yield entry[1]

    def _lower(self) -> list[tuple[float, N]]:
        """Return ``_heap`` or ``_unclean``, the one whose first entry is lower. Return an empty heap only if both are
        empty."""
        if not self._unclean or (self._heap and self._heap[0] <= self._unclean[0]):
            return self._heap
        return self._unclean

    def _clean(self) -> None:
        """Take a few entries from the end of ``_unclean``, the heap of unchecked entries. Move the valid ones to
        ``_heap``, and drop the others."""
        for _ in range(min(CLEANED, len(self._unclean))):
            entry = self._unclean.pop()
            if self._is_valid(*entry) and entry not in self._cleaned:
                self._cleaned.add(entry)
                heappush(self._heap, entry)
        if not self._unclean:
            self._cleaned = set()


class UnmatchedFeedback:
    """Unmatched items by target, bounded for each API key and in total, so that no client can exhaust the memory.

    One item takes about 1 KB, including its entries in ``Matching``.
    """

    def __init__(self) -> None:
        self._targets: dict[str, FeedbackItem | dict[str, FeedbackItem]] = {}
        """Target -> its item, or a dictionary of its items by id: most targets have only one, which saves memory."""
        self._keys: dict[str, dict[str, FeedbackItem]] = {}
        """Items by API key, oldest first. Plain dictionaries of ``FeedbackItem``, which the garbage collector skips."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[FeedbackItem]:
        return (item for items in self._keys.values() for item in items.values())

    def add(self, target: str, item: FeedbackItem) -> list[FeedbackItem]:
        """Hold an item; return the items that the caller must ``remove`` because there are too many.

        These are the oldest item of the new item's API key, or the oldest items of the key with the most items.
        An item that is already held keeps its position in the order of its key.
        """
        name, of_key = item.feedback.id, self._keys.get(item.feedback.key_id)
        if of_key is None:
            of_key = self._keys[item.feedback.key_id] = {}
        known = self._targets.setdefault(target, item)
        if isinstance(known, dict):
            known[name] = item
        elif known is not item:
            self._targets[target] = {known.feedback.id: known, name: item} if known.feedback.id != name else item
        before, of_key[name] = len(of_key), item
        self._count += len(of_key) - before
        if len(of_key) > MAX_PER_KEY:
            return [next(iter(of_key.values()))]
        if self._count > MAX_UNMATCHED:
            heaviest = max(self._keys.values(), key=len)
            return list(islice(heaviest.values(), EVICTED_AT_ONCE))
        return []

    def remove(self, target: str, name: str) -> None:
        """Release the item ``name`` (its id) that waits for ``target``."""
        items = self._targets.get(target)
        if isinstance(items, FeedbackItem):
            if items.feedback.id == name:
                del self._targets[target]
                self._remove_from_key(items)
        elif items is not None and (item := items.pop(name, None)) is not None:
            self._remove_from_key(item)
            if not items:
                del self._targets[target]

    def pop(self, target: str) -> dict[str, FeedbackItem]:
        """Release and return the items of a target, by id."""
        found = self._targets.pop(target, {})
        items = {found.feedback.id: found} if isinstance(found, FeedbackItem) else found
        for item in items.values():
            self._remove_from_key(item)
        return items

    def _remove_from_key(self, item: FeedbackItem) -> None:
        of_key = self._keys.get(item.feedback.key_id)
        if of_key is not None:
            self._count -= of_key.pop(item.feedback.id, None) is not None
            if not of_key:
                del self._keys[item.feedback.key_id]


class UndecidedFeedback:
    """Undecided items of feedback by id, and the stream sequence numbers of their messages in FEEDBACK."""

    def __init__(self) -> None:
        self.items: dict[str, FeedbackItem] = {}
        self._counts: dict[int, int] = {}
        """Number of undecided items in each message, by the stream sequence number of the message."""
        self._seqs = LazyHeap[int](lambda _, seq: seq in self._counts, self._counts.__len__)

    def add(self, item: FeedbackItem) -> None:
        """Add an item whose id is not held yet."""
        self.items[item.feedback.id] = item
        count = self._counts.get(item.seq, 0)
        self._counts[item.seq] = count + 1
        if not count:
            self._seqs.put(item.seq, item.seq)

    def remove(self, name: str) -> FeedbackItem | None:
        """Remove and return an item, or return None if it is not held."""
        item = self.items.pop(name, None)
        if item is not None:
            self._counts[item.seq] -= 1
            if not self._counts[item.seq]:
                del self._counts[item.seq]
        return item

    def lowest_seq(self, without: Iterable[str]) -> int | None:
        """Return the lowest stream sequence number of the items that are not in ``without``, or None if there are
        none."""
        left_out = Counter(self.items[name].seq for name in without if name in self.items)
        found = self._seqs.lowest({seq for seq, count in left_out.items() if count == self._counts[seq]})
        return None if found is None else int(found)


class PendingRetractions:
    """Retractions that arrived before the item they retract.

    They wait as long as unmatched feedback, which also limits how long they hold back the low-water mark.
    """

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, tuple[int, Feedback]] = OrderedDict()
        """Retractions and their stream sequence numbers, by the item that they retract."""
        self._seqs = LazyHeap(self._is_at, self.waiting.__len__)
        self._times = LazyHeap(self._was_received, self.waiting.__len__)

    def _is_at(self, seq: float, name: str) -> bool:
        return name in self.waiting and self.waiting[name][0] == seq

    def _was_received(self, time: float, name: str) -> bool:
        return name in self.waiting and self.waiting[name][1].received == time

    @property
    def lowest_seq(self) -> int | None:
        """Lowest stream sequence number in FEEDBACK of a pending retraction."""
        found = self._seqs.lowest()
        return None if found is None else int(found)

    def put(self, name: str, seq: int, retraction: Feedback) -> str:
        """Hold a retraction of item ``name``. If that makes too many, drop the oldest and return its id; otherwise
        return ''."""
        self.waiting[name] = (seq, retraction)
        self._seqs.put(seq, name)
        self._times.put(retraction.received, name)
        return self.pop(next(iter(self.waiting))) if len(self.waiting) > MAX_RETRACTIONS else ""

    def pop(self, name: str) -> str:
        """Release the retraction of the item ``name``, and return the id of the retraction."""
        return self.waiting.pop(name)[1].id

    def expire(self, limit: float) -> list[str]:
        """Release the retractions received before ``limit``, whose items never arrived; return the retractions' ids."""
        return [self.pop(name) for name in self._times.pop_until(limit, inclusive=False)]
