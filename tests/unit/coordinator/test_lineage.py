"""Groups that a deletion must not remove yet because a trainer may need them, as the ledger alone shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.services.coordinator.feedback.lineage import UserDataLineage
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchRefused,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Dropped,
    Event,
    Finished,
    LineageForked,
    Promoted,
    SealedGroup,
)
from penstock.shared.protocol.ids import Draw

BASE: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}
OPEN: dict[str, Any] = {"min_version": 0, "deadline": 9.0}


def admitted(*ordinals: int, time: float = 0.0) -> Admitted:
    """Admit an answer to user ``u`` per ordinal; from 100 on, feedback of others that was posted with its content."""
    admissions = [
        Admission(
            o, {f"i{o}": o} if o < 100 else {}, {f"f{o}": o}, 1.0, 0, "k", "u" if o < 100 else "", "feedback", time
        )
        for o in ordinals
    ]
    return Admitted(**BASE, admissions=admissions, low_interactions=1, low_feedback=1)


def trained(number: int, *ordinals: int) -> list[Event]:
    groups = [SealedGroup(Draw(o), "a", 10 * number, "d", number - 1, number - 1, [1.0], 4, "w") for o in ordinals]
    sealed = BatchSealed(
        **BASE, number=number, revision=1, start_version=number - 1, update_index=number - 1, groups=groups
    )
    done = BatchTrained(**BASE, number=number, revision=1, version=number, digest="w", trainer_epoch=1)
    return [sealed, done]


def saved(number: int, low_seq: int = 0) -> Checkpointed:
    return Checkpointed(**BASE, number=number, version=number, digest="w", path="p", trainer_epoch=1, low_seq=low_seq)


def forked(from_batch: int, *, redraw: bool = True) -> LineageForked:
    return LineageForked(
        **BASE, **OPEN, from_batch=from_batch, version=9, digest="f", reason="r", trainer_epoch=1, redraw=redraw
    )


def made_after(*events: Event | Sequence[Event]) -> UserDataLineage:
    made = UserDataLineage("u", set(), set(), ["f100", "f101"], until=5.0)
    for event in events:
        for one in [event] if isinstance(event, Event) else event:
            made.take(one)
    return made


THREE = [
    admitted(1, 2, 3, 100, 101),
    saved(0),
    trained(1, 1),
    saved(1),
    trained(2, 2, 100),
    trained(3, 3, 101),
    saved(3),
]


def test_a_checkpoint_after_a_batch_releases_its_groups() -> None:
    assert made_after(*THREE[:1]).held == {1, 2, 3}
    before = made_after(*THREE[:-1])
    assert (before.held, before.needed) == ({2, 3}, {"f100", "f101"})
    after = made_after(*THREE)
    assert (after.held, after.needed) == (set(), frozenset())
    assert after.versions == {1, 2, 3}


@pytest.mark.parametrize(("redraw", "open_again"), [(True, {3}), (False, set[int]())])
def test_a_fork_holds_what_its_trainer_may_have_to_repeat(redraw: bool, open_again: set[int]) -> None:
    """The fork discards checkpoint 3; without a later one, a trainer starts from checkpoint 1 and repeats batch 2."""
    made = made_after(*THREE, forked(3, redraw=redraw))
    assert made.held == {2} | open_again
    assert made.needed == {"f100"} | ({"f101"} if redraw else set())
    made.take(saved(2))
    assert made.held == open_again


def test_a_trainer_that_rebuilds_the_served_version_needs_the_batches_before_it() -> None:
    """Version 2 is served and version 3 was refused, so a new trainer starts from checkpoint 1."""
    before = [*THREE[:-1], Promoted(**BASE, number=2, version=2, digest="w", reason="r"), saved(3)]
    made = made_after(*before)
    assert (made.held, made.needed) == ({2, 3}, {"f100", "f101"})
    made.take(Promoted(**BASE, number=3, version=3, digest="w", reason="r"))
    assert made.held == set()


def test_messages_of_the_user_after_the_deletion_are_not_part_of_it() -> None:
    """A deletion covers earlier data only; otherwise a user who goes on talking would delay it for ever."""
    made = made_after(*THREE, admitted(4, time=5.0), admitted(5, time=5.1))
    assert (made.ordinals, made.held) == ({1, 2, 3, 4}, {4})


def test_groups_that_left_the_log_are_released() -> None:
    made = made_after(*THREE[:-1], saved(3, low_seq=25), forked(3))
    assert made.held == {3}, "the group of batch 2 made room"


def test_draws_that_end_without_training_are_released() -> None:
    made = made_after(*THREE, admitted(4, 5, 6), trained(4, 4, 5)[:1])
    assert made.held == {4, 5, 6}
    refusal: dict[str, Any] = {"number": 4, "revision": 1, "bad": [Draw(4)], "reason": "r"}
    made.take(BatchRefused(**BASE, **OPEN, **refusal, redraw=False))
    assert made.held == {5, 6}
    made.take(Dropped(**BASE, **OPEN, draws=[Draw(6)], lengths=[0], reason="erased", redraw=False))
    assert made.held == {5}
    made.take(Finished(**BASE, reason="failed", summary={}))
    assert made.held == set()
