"""The fold of a ledger refuses each event that breaks a rule, at that event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.services.coordinator.training.ledger import NO_SIGNAL, LedgerState, fold
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchRefused,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Dropped,
    Event,
    Finished,
    JobStarted,
    LineageForked,
    Redrawn,
    SealedGroup,
)
from penstock.shared.protocol.ids import Draw

BASE: dict[str, Any] = {"writer_epoch": 2, "time": 0.0}
OPEN: dict[str, Any] = {"min_version": 0, "deadline": 9.0}


def sealed(number: int, ordinals: Sequence[int], revision: int = 1) -> BatchSealed:
    groups = [SealedGroup(Draw(o), f"a{o}", o + 10, f"d{o}", number - 1, number - 1, [1.0], 4, "w") for o in ordinals]
    return BatchSealed(
        **BASE, number=number, revision=revision, start_version=number - 1, update_index=number - 1, groups=groups
    )


def trained(number: int, revision: int = 1, version: int | None = None) -> BatchTrained:
    version = number if version is None else version
    return BatchTrained(
        **BASE, number=number, revision=revision, version=version, digest=f"w{version}", trainer_epoch=1
    )


def saved(number: int, low_seq: int = 0) -> Checkpointed:
    return Checkpointed(
        **BASE, number=number, version=number, digest=f"w{number}", path="p", trainer_epoch=1, low_seq=low_seq
    )


def forked(from_batch: int, version: int, *, redraw: bool = True) -> LineageForked:
    return LineageForked(
        **BASE, **OPEN, from_batch=from_batch, version=version, digest="f", reason="r", trainer_epoch=1, redraw=redraw
    )


def dropped(*ordinals: int, reason: str = "failed") -> Dropped:
    return Dropped(**BASE, **OPEN, draws=[Draw(o) for o in ordinals], lengths=[], reason=reason, redraw=False)


def admitted(ordinal: int, interaction: int, feedback: int, low: int = 1) -> Admitted:
    admission = Admission(
        ordinal, {f"i{interaction}": interaction}, {f"f{feedback}": feedback}, 1.0, 0, "k", "u", "feedback", 0.0
    )
    return Admitted(**BASE, admissions=[admission], low_interactions=low, low_feedback=low)


START: list[Event] = [
    JobStarted(**BASE, config_digest="c", settings={}),
    saved(0),
    Drawn(**BASE, **OPEN, start=0, stop=8),
]
TWO = [*START, sealed(1, [0, 1]), trained(1), sealed(2, [2, 3])]


def state_after(*events: Event) -> LedgerState:
    return fold([*START, *events])


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Drawn(writer_epoch=1, time=0.0, **OPEN, start=8, stop=9), "epoch went back from 2 to 1"),
        (Drawn(**BASE, **OPEN, start=9, stop=10), "without gaps"),
        (Drawn(**BASE, **OPEN, start=7, stop=9), "without gaps"),
        (Redrawn(**BASE, **OPEN, draw=Draw(4), letter=1), "is open already"),
        (Finished(**BASE, reason="succeeded", summary={}), "finished with open draws"),
        (dropped(2), "a sealed draw cannot be dropped"),
        (sealed(4, [4, 5]), "sealed out of turn"),
        (sealed(3, [4, 5], revision=2), "revisions count up"),
        (sealed(3, [2, 4]), "is sealed already"),
        (trained(2, revision=2), "revision"),
        (trained(2, version=3), "one version per update"),
        (forked(1, 1), "a fork continues above the clock"),
    ],
    ids=str,
)
def test_an_event_that_breaks_a_rule_is_refused(event: Event, message: str) -> None:
    state = fold(TWO)
    with pytest.raises(AssertionError, match=message):
        state.apply(event)


def test_batches_are_trained_in_order() -> None:
    state = fold([*TWO, sealed(3, [4, 5])])
    with pytest.raises(AssertionError, match="in order"):
        state.apply(trained(3))


def test_a_dead_letter_is_replayed_once() -> None:
    state = state_after(dropped(4), Redrawn(**BASE, **OPEN, draw=Draw(4, 1000), letter=1))
    with pytest.raises(AssertionError, match="dead letter 1 is replayed once"):
        state.apply(Redrawn(**BASE, **OPEN, draw=Draw(4, 1001), letter=1))


def test_live_answers_and_feedback_count_once() -> None:
    state = state_after(admitted(0, 10, 20))
    for again, match in (
        (admitted(1, 10, 21), "trained once already"),
        (admitted(1, 11, 20), "feedback counts once"),
    ):
        with pytest.raises(AssertionError, match=match):
            state.apply(again)
    state.apply(admitted(1, 11, 21, low=10))
    assert (state.consumed, state.used) == ({"i10": 10, "i11": 11}, {"f20": 20, "f21": 21})
    state.apply(admitted(2, 12, 22, low=11))
    assert state.consumed == {"i11": 11, "i12": 12}, "below the mark everything is decided"


def test_the_fold_of_sealed_and_refused_batches() -> None:
    state = fold([*TWO, sealed(3, [4, 5])])
    assert (state.epoch, state.next_ordinal, state.trained) == (2, 8, 2)
    assert state.in_flight == [Draw(6), Draw(7)]
    assert (state.next_number, state.start_version(4), state.update_index(4)) == (4, 3, 3)
    state.apply(BatchRefused(**BASE, **OPEN, number=3, revision=1, bad=[Draw(4)], reason="r", redraw=True))
    assert state.in_flight == [Draw(4, 1), Draw(5), Draw(6), Draw(7)]
    state.apply(sealed(3, [5, 6], revision=2))
    assert state.balanced()


def test_replacements_count_until_the_next_batch() -> None:
    state = state_after(dropped(6, 7, reason=NO_SIGNAL))
    assert state.resampled == 2
    state.apply(sealed(1, [0, 1]))
    assert state.resampled == 0


@pytest.mark.parametrize("redraw", [True, False])
def test_a_fork_rolls_back_its_first_batch_and_all_later_ones(redraw: bool) -> None:
    three = [trained(2), saved(2), sealed(3, [4, 5]), trained(3), sealed(4, [6, 7])]
    state = fold([*TWO, saved(1), *three, forked(2, 9, redraw=redraw)])
    assert (state.version, state.updates, state.trained) == (9, 1, 2)
    assert [state.in_lineage(number) for number in (1, 2, 3)] == [True, False, False]
    assert sorted(state.checkpoints) == [0, 1]
    assert state.dropped["rolled_back"] == 6
    assert state.in_flight == ([Draw(o, 1) for o in range(2, 8)] if redraw else [])


def test_a_checkpoint_keeps_what_a_replay_needs() -> None:
    """Batch 1 has sequences 10 and 11, batch 2 has 12 and 13; a batch with a group at or above ``low_seq`` stays."""
    state = fold([*TWO, trained(2), saved(2, low_seq=12)])
    assert sorted(state.batches) == [2]
    assert sorted(fold([*TWO, trained(2), saved(2, low_seq=11)]).batches) == [1, 2]
