"""Quarantine: unusual items are held, and a new leader holds the same ones."""

from __future__ import annotations

import random
import statistics
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.quarantine import Outliers, Quarantine, Window
from penstock.services.coordinator.training.decision import Draft
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.quarantine import QuarantineConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import Quarantined
from penstock.shared.protocol.live.interaction import Erasure, Feedback, FeedbackStatus

NOW = 1000.0
CONFIG = OnlineJob.parse(
    {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "online": {
            "metrics": {"rating": {"type": "float"}, "accepted": {"type": "boolean"}},
            "quarantine": {"min_items": 10, "window": 50, "hold_s": 100.0},
        },
    }
)  # fmt: skip


def name_of(number: int) -> str:
    return f"0192f0c1-0000-7000-8000-{number:012x}"


def rating(number: int, value: Any, **changes: Any) -> Feedback:
    fields: dict[str, Any] = {
        "id": name_of(number), "job": "j", "kind": "metric", "key_id": "k1", "received": NOW, "inference": "i",
        "metric": "rating", "value": value,
    }  # fmt: skip
    return Feedback(**fields | changes)


def decided(kind: Any, number: int) -> Feedback:
    body = {"feedback": name_of(number)}
    return Feedback(id=f"{kind}-{number}", job="j", kind=kind, key_id="admin", received=NOW, body=body)


class Reader:
    """A quarantine, and the items that it passed on."""

    def __init__(self, state: LedgerState | None = None) -> None:
        self.passed: list[str] = []
        self.quarantine = Quarantine(CONFIG, self._pass)
        self.quarantine.restore(state or LedgerState())

    def _pass(self, seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        self.passed.append(item.id)
        return []

    def read(self, *items: Feedback, start: int = 1) -> list[tuple[str, str]]:
        """Read ``items`` as messages from sequence ``start`` on; return (status, reason) of each status."""
        found = []
        for seq, item in enumerate(items, start):
            found += [(status.status, status.reason) for status in self.quarantine.on_feedback(seq, item, NOW)]
        return found


def usual(count: int, *, seed: int = 0, metric: str = "rating") -> list[Feedback]:
    values = random.Random(seed)
    return [rating(number, round(values.uniform(-0.2, 0.2), 3), metric=metric) for number in range(count)]


# -- rules -------------------------------------------------------------------------------------------------------------


def test_a_value_far_from_the_median_is_an_outlier_given_enough_values() -> None:
    outliers = Outliers(QuarantineConfig(min_items=10, window=50))
    values = [0.1, 0.12, 0.09, 0.11, 0.1, 0.13, 0.08, 0.1, 0.11]
    assert all(not outliers.judge("k", "m", value, 2.0) for value in values)
    assert outliers.judge("k", "m", 1.0, 2.0) == "", "the tenth value is learned, too"
    assert outliers.judge("k", "m", 1.0, 2.0).startswith("outlier: 1 is ")
    assert outliers.judge("other", "m", 1.0, 2.0) == "", "usual values are per source"


def test_equal_values_do_not_make_every_other_value_an_outlier() -> None:
    outliers = Outliers(QuarantineConfig(min_items=10, window=50))
    assert all(not outliers.judge("k", "m", 0.5, 2.0) for _ in range(20))
    assert outliers.judge("k", "m", 0.6, 2.0) == ""
    assert outliers.judge("k", "m", 0.9, 2.0) != ""


def test_a_drifting_source_is_held_until_it_returns() -> None:
    outliers = Outliers(QuarantineConfig(min_items=20, window=100))
    values = random.Random(1)
    for _ in range(100):
        assert outliers.judge("k", "accepted", values.random() < 0.2, 1.0) == ""
    flipped = [outliers.judge("k", "accepted", True, 1.0) for _ in range(30)]
    first = next(place for place, reason in enumerate(flipped) if reason)
    assert first < 15, "soon"
    assert flipped[first].startswith("drift: ")
    assert all(flipped[first:]), "the drift continues"
    back = [outliers.judge("k", "accepted", values.random() < 0.2, 1.0) for _ in range(60)]
    assert not any(back[40:])


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0.05, 0.95), seed=st.integers(0, 1000))
def test_a_steady_source_is_hardly_ever_held(share: float, seed: int) -> None:
    outliers = Outliers(QuarantineConfig())
    values = random.Random(seed)
    held = sum(bool(outliers.judge("k", "accepted", values.random() < share, 1.0)) for _ in range(400))
    assert held <= 20


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.1, 0.25, 2.0, 30.0]), min_size=1, max_size=60),
    size=st.integers(1, 20),
)
def test_a_window_has_the_statistics_of_its_values(values: list[float], size: int) -> None:
    window = Window(size)
    for count, value in enumerate(values, 1):
        window.add(value)
        newest = values[max(0, count - size) : count]
        median = statistics.median(newest)
        assert len(window) == len(newest)
        assert window.median == median
        assert window.mad == pytest.approx(statistics.median(abs(one - median) for one in newest))
        assert (window.sum, window.mean) == pytest.approx((sum(newest), statistics.fmean(newest)))
        assert window.deviation == pytest.approx(statistics.pstdev(newest), abs=1e-6)


def test_a_wide_window_is_as_fast_as_a_narrow_one() -> None:
    """The test counts comparisons of values, not seconds: a wide window needs hardly more than a narrow one."""
    comparisons = 0

    class Value(float):
        def __lt__(self, other: float) -> bool:
            nonlocal comparisons
            comparisons += 1
            return float(self) < float(other)

    window, values = Window(4000), random.Random(3)
    for _ in range(4000):
        window.add(Value(values.random()))
    comparisons = 0
    window.add(Value(0.5))
    assert 0 < comparisons < 40
    assert window.mad == pytest.approx(0.25, abs=0.03)


def test_the_window_must_be_as_large_as_min_items() -> None:
    with pytest.raises(ConfigError, match="do not fit in a window of 20"):
        QuarantineConfig.parse({"window": 20, "min_items": 30})


# -- life of an item ---------------------------------------------------------------------------------------------------


def test_a_held_outlier_has_no_effect() -> None:
    reader = Reader()
    assert reader.read(*usual(20)) == []
    ((status, reason),) = reader.read(rating(50, 1.0), start=21)
    assert (status, reason.partition(":")[0]) == ("quarantined", "outlier")
    assert name_of(50) not in reader.passed
    assert reader.quarantine.lowest_seq == 21
    assert reader.read(rating(50, 1.0), start=22) == [], "the same item again"
    assert reader.quarantine.num_held == 1


@pytest.mark.parametrize(("metric", "is_held"), [("rating", True), ("reward", True), ("liked", False)])
def test_items_of_declared_and_undeclared_metrics_are_held(metric: str, is_held: bool) -> None:
    reader = Reader()
    assert reader.read(*usual(20, metric=metric)) == []
    assert bool(reader.read(rating(50, 1.0, metric=metric), start=21)) is is_held


def test_a_released_item_counts_and_a_dropped_one_is_rejected() -> None:
    reader = Reader()
    reader.read(*usual(20), rating(50, 1.0), rating(51, 1.0))
    assert reader.read(decided("release", 50), start=30) == []
    assert reader.passed[-1] == name_of(50)
    assert reader.read(decided("drop", 51), start=31) == [("rejected", "quarantine_dropped")]
    assert reader.quarantine.num_held == 0
    assert reader.read(decided("release", 51), decided("drop", 50), start=32) == [], "decided once"
    assert name_of(51) not in reader.passed


def test_a_retraction_or_a_revision_ends_the_hold() -> None:
    reader = Reader()
    reader.read(*usual(20), rating(50, 1.0), rating(51, 1.0))
    assert reader.read(decided("retraction", 50), start=30) == []
    assert reader.passed[-2:] == [name_of(50), "retraction-50"], "both, in this order"
    assert reader.read(rating(51, 0.0, revision=1, key_id="k2"), start=31) == [], (
        "no key revises the feedback of another"
    )
    assert reader.read(rating(51, 0.05, revision=1), start=32) == []
    assert reader.passed[-1] == name_of(51)
    assert reader.quarantine.num_held == 0


def test_an_item_retracted_while_held_is_retracted() -> None:
    matching = Matching(CONFIG)
    found, items = Quarantine(CONFIG, matching.on_feedback), [*usual(20), rating(50, 1.0), decided("retraction", 50)]
    statuses = [status for seq, item in enumerate(items, 1) for status in found.on_feedback(seq, item, NOW)]
    ends = {status.feedback: (status.status, status.reason) for status in statuses}
    assert ends[name_of(50)] == ("retracted", "by retraction-50")
    assert ends["retraction-50"] == ("retracted", f"retracts {name_of(50)}")
    assert found.on_feedback(40, items[20], NOW) == [], "copied by a deletion"
    later = NOW + CONFIG.online.match_ttl_s + 1
    expired = [status.feedback for status in matching.sweep(version=0, now=later) if status.status == "expired"]
    assert sorted(expired) == [name_of(number) for number in range(20)], "the retraction does not wait for anything"
    assert matching.low_water()[1] == 40


def test_held_items_expire_and_are_rejected_when_the_job_ends() -> None:
    reader = Reader()
    reader.read(*usual(20), rating(50, 1.0), rating(51, 1.0, received=NOW + 50))
    statuses = reader.quarantine.sweep(NOW + 120)
    assert [(status.feedback, status.reason) for status in statuses] == [(name_of(50), "quarantine_expired")]
    assert [status.reason for status in reader.quarantine.on_job_end(NOW + 130)] == ["job_ended"]
    assert reader.quarantine.num_held == 0


def test_deleted_feedback_is_not_held_any_more() -> None:
    reader = Reader()
    reader.read(*usual(20), rating(50, 1.0))
    reader.quarantine.on_erasure(Erasure(user="u", interactions=[], feedback=[name_of(50)], time=NOW))
    assert reader.read(decided("release", 50), start=30) == []
    assert name_of(50) not in reader.passed


def test_the_older_half_is_rejected_for_space() -> None:
    reader = Reader()
    reader.read(*usual(20), rating(50, 1.0), rating(51, 1.0), rating(52, 1.0))
    statuses = reader.quarantine.reject_older_half(NOW)
    assert [(status.feedback, status.status, status.reason) for status in statuses] == [
        (name_of(number), "rejected", "quarantine_full") for number in (50, 51)
    ]
    assert reader.quarantine.lowest_seq == 23
    assert len(reader.quarantine.reject_older_half(NOW)) == 1
    assert reader.quarantine.reject_older_half(NOW) == []


def test_a_released_item_counts_from_its_copy() -> None:
    """A deletion copied the item behind its release, so a later leader reads the release first."""
    state = LedgerState()
    state.apply(Quarantined(writer_epoch=1, time=NOW, items={name_of(50): 21}))
    reader = Reader(state)
    assert reader.read(*usual(20), decided("release", 50)) == []
    assert reader.read(rating(50, 1.0), start=40) == []
    assert (reader.passed[-1], reader.quarantine.num_held) == (name_of(50), 0)
    ((status, _),) = reader.read(rating(50, 1.1, revision=1), start=41)
    assert status == "quarantined", "another item of the same sender is not affected"


def test_a_rejected_item_does_not_count_from_its_copy() -> None:
    reader = Reader()
    reader.read(*usual(20), rating(50, 1.0), rating(51, 1.0), decided("drop", 50))
    assert [status.feedback for status in reader.quarantine.sweep(NOW + 120)] == [name_of(51)]
    assert reader.read(rating(50, 1.0), rating(51, 1.0), start=40) == []
    assert not {name_of(50), name_of(51)} & {*reader.passed}
    reader.read(rating(50, 0.05, revision=1, received=NOW + 1), start=50)
    assert reader.passed[-1] == name_of(50), "its sender may post it again"


# -- another leader ----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.sampled_from([-0.1, 0.0, 0.05, 0.1, 0.9, -1.0]), min_size=12, max_size=60),
    cut=st.integers(0, 60),
    low=st.integers(0, 60),
)
def test_a_new_leader_that_reads_from_the_mark_holds_the_same_items(values: list[float], cut: int, low: int) -> None:
    """The new leader learns usual values from messages below the mark, and reads the later messages again."""
    items = [rating(number, value, key_id=f"k{number % 2}") for number, value in enumerate(values)]
    whole = Reader()
    statuses = whole.read(*items)
    before = Reader()
    before.read(*items[:cut])
    low = min(low, cut, before.quarantine.lowest_seq - 1)
    after = Reader()
    for item in items[:low]:
        after.quarantine.learn(item)
    again = after.read(*items[low:], start=low + 1)
    assert after.passed == whole.passed[len(whole.passed) - len(after.passed) :]
    assert len(again) == len(statuses), "items below the mark are not held"


def test_items_that_the_ledger_records_are_held() -> None:
    state = LedgerState()
    state.apply(Quarantined(writer_epoch=1, time=NOW, items={name_of(50): 21}))
    reader = Reader(state)
    assert reader.read(rating(50, 1.0), start=21) == [], "its status is published already"
    assert reader.quarantine.num_held == 1
    assert reader.read(decided("release", 50), start=30) == []
    assert reader.passed == [name_of(50)]


def test_a_revision_that_passed_passes_for_a_new_leader() -> None:
    """A new leader that held the revision would hide it: the newest published status is not quarantined."""
    state = LedgerState()
    state.apply(Quarantined(writer_epoch=1, time=NOW, items={name_of(50): 21}))
    reader = Reader(state)
    assert reader.read(*usual(20), rating(50, 1.0), rating(50, 0.05, revision=1)) == []
    assert (reader.passed[-1], reader.quarantine.num_held) == (name_of(50), 0)
    reader.read(rating(50, 1.0), start=40)
    assert reader.quarantine.num_held == 0, "the earlier revision, which a deletion copied"


def test_a_copy_of_a_held_item_is_not_newer() -> None:
    passed: list[tuple[int, int]] = []

    def take(seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        passed.append((seq, item.seq))
        return []

    found = Quarantine(CONFIG, take)
    for seq, item in enumerate([*usual(20), rating(50, 1.0)], 1):
        found.on_feedback(seq, item, NOW)
    found.on_feedback(40, rating(50, 1.0, seq=21), NOW)
    found.on_feedback(41, decided("release", 50), NOW)
    assert passed[-1] == (40, 21), "its present and its original sequence"


def test_a_held_item_is_found_at_its_copy() -> None:
    reader, run = Reader(), JobRun(CONFIG, LedgerState(), num_ordinals=None, writer_epoch=1)
    reader.read(*usual(20), rating(50, 1.0))
    draft = Draft(run, run.state, Inputs(NOW))
    for seq in (21, 40):
        assert reader.read(rating(50, 1.0), start=seq) == []
        reader.quarantine.draft(draft)
        assert (reader.quarantine.lowest_seq, draft.state.quarantined) == (seq, {name_of(50): seq})
    reader.quarantine.draft(draft)
    assert len(draft.events) == 2, "recorded once at each sequence"
    later = Reader(draft.state)
    assert later.read(rating(50, 1.0), start=40) == []
    assert later.quarantine.num_held == 1
    unrecorded = Reader(LedgerState(quarantined={name_of(50): 21}))
    assert unrecorded.read(rating(50, 1.0), start=40) == []
    assert unrecorded.quarantine.num_held == 1, "the earlier leader had not recorded it"
