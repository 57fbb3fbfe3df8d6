"""Revisions and retractions of feedback: which item counts, and the status of a late one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.training.ledger import LedgerState

spec = importlib.util.spec_from_file_location("online_learning", Path(__file__).with_name("test_online_learning.py"))
assert spec is not None
assert spec.loader is not None
learning: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning)
NOW, interaction, job, rating = learning.NOW, learning.interaction, learning.job, learning.rating


def reward_of(matching: Matching) -> float:
    matching.sweep(version=5, now=NOW + 90)
    return matching.ready["i1"][0].reward


def test_the_item_that_is_later_in_the_stream_counts() -> None:
    """Neither the clocks of the receiving coordinators nor the time when a leader reads the answer matters."""
    ahead, behind = rating("f1", 0.25, received=NOW + 60), rating("f2", -0.5, received=NOW - 60)
    for answer_first in (True, False):
        for key in ("k1", "k2"):
            matching = Matching(job())
            if answer_first:
                matching.on_interaction(1, interaction())
            matching.on_feedback(3, ahead, NOW)
            matching.on_feedback(4, replace(behind, key_id=key), NOW)
            if not answer_first:
                matching.on_interaction(1, interaction())
            assert reward_of(matching) == (-0.5 if key == "k1" else -0.125)
            assert matching.ready["i1"][0].key_id == key


def test_a_copy_left_by_a_deletion_is_not_newer() -> None:
    first, second = rating("f1", 0.25), rating("f2", -0.5)
    moved = replace(first, seq=3)
    leader, heir = Matching(job()), Matching(job())
    for matching in (leader, heir):
        matching.on_interaction(1, interaction())
    leader.on_feedback(3, first, NOW)
    for matching in (leader, heir):
        matching.on_feedback(4, second, NOW)
        matching.on_feedback(9, moved, NOW)  # the next leader finds no other trace of it
        assert reward_of(matching) == -0.5
        assert {name: item.seq for name, item in matching.ready["i1"][0].feedback.items()} == {"f1": 9, "f2": 4}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("admitted", "late_after_training"), ("rejected", "already_rejected"), ("expired", "already_expired"),
        ("retracted", "already_retracted"),
    ],
)  # fmt: skip
def test_a_late_retraction_names_the_status_of_its_item(end: str, reason: str) -> None:
    matching = Matching(job())
    if end == "admitted":
        matching.restore(LedgerState(used={"f1": 3}))
    elif end == "rejected":
        matching.on_feedback(3, rating("f1", 1e9), NOW)
    else:
        matching.on_feedback(3, rating("f1"), NOW)
    if end == "expired":
        matching.sweep(version=5, now=NOW + 1e6)
    if end == "retracted":
        matching.on_feedback(4, rating("r0", None, kind="retraction", body={"feedback": "f1"}), NOW)
    (late,) = matching.on_feedback(5, rating("r1", None, kind="retraction", body={"feedback": "f1"}), NOW)
    assert (late.feedback, late.status, late.reason) == ("r1", "rejected", reason)
