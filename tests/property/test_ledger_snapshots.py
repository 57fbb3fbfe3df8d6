"""A snapshot and the events after it fold to the same state as the whole ledger, at every point of any history."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.snapshot import Snapshot, decode_snapshot, encode_snapshot
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import (
    BatchRefused,
    BatchSealed,
    BatchTrained,
    CanaryBegun,
    CanaryJudged,
    Checkpointed,
    Decided,
    Drawn,
    Dropped,
    EndedFeedback,
    EndedInteractions,
    Event,
    JobStarted,
    Judged,
    LineageForked,
    PackedIds,
    PhaseChanged,
    Promoted,
    PromotionRefused,
    Quarantined,
    Redrawn,
    SealedGroup,
    SettingsChanged,
)
from penstock.shared.protocol.ids import Draw

JOB = "job_history"

UUID = "0192f0c1-0000-7000-8000-000000000001"


def histories() -> st.SearchStrategy[list[Event]]:
    """Return a strategy for sequences of events that a ledger may hold."""
    return st.composite(_history)()


def _history(draw: st.DrawFn) -> list[Event]:
    state, events = LedgerState(), []
    for _ in range(draw(st.integers(1, 25))):
        event = _next_event(draw, state)
        state.apply(event)
        events.append(event)
    return events


def _next_event(draw: st.DrawFn, state: LedgerState) -> Event:  # noqa: C901, PLR0911, PLR0912  one case for each kind
    """Draw an event that the state allows."""
    epoch = state.epoch + draw(st.sampled_from([0, 0, 0, 1]))
    base = {"writer_epoch": epoch, "time": 5.0}
    plan = {"min_version": state.version, "deadline": 9.5}
    next_sealed = state.sealed.get(state.last_trained + 1)
    kinds = ["drawn", "drawn", "phase", "started", "settings"]
    kinds += ["redrawn"] if state.next_ordinal else []
    kinds += ["dropped", "sealed", "sealed"] if state.in_flight else []
    kinds += ["trained", "trained", "trained"] if next_sealed else []
    kinds += ["refused"] if state.sealed else []
    kinds += ["checkpointed"] if state.last_trained or state.checkpoint is None else []
    kinds += ["forked"] if state.batches else []
    kinds += ["promoted", "promotion_refused", "quarantined", "decided"]
    kinds += ["canary_judged"] * 2 if state.canary is not None else [] if state.sealed else ["canary_begun"]
    match draw(st.sampled_from(kinds)):
        case "canary_begun":
            return CanaryBegun(
                **base, version=state.version, number=state.last_trained, digest="w", served=0, share=0.25,
            )  # fmt: skip
        case "canary_judged":
            name = str(draw(st.integers(0, 5)))
            sample = Judged(
                f"c{name}", draw(st.booleans()), draw(st.sampled_from([0.5, -1.0])), [name], ["k"], ["a"], ["u"]
            )
            return CanaryJudged(**base, version=state.version, judged=[sample])
        case "promoted":
            return Promoted(**base, version=state.version, number=state.last_trained, digest="w", reason="passed")
        case "promotion_refused":
            return PromotionRefused(
                **base, version=state.version, number=state.last_trained, reason="x", figures={"mismatch/kl": 0.5}
            )
        case "quarantined":
            return Quarantined(**base, items={draw(st.text(max_size=3)): draw(st.integers(1, 9))})
        case "decided":
            names = PackedIds.of(draw(st.lists(st.sampled_from([UUID, "a", "b"]), unique=True)))
            ended = EndedFeedback(names, "rejected", "stale", draw(st.integers(0, 1)))
            marks = draw(st.integers(1, 9)), draw(st.integers(1, 9))
            refused = [EndedInteractions(names, "no_tokens")]
            return Decided(**base, feedback=[ended], interactions=refused, episodes=b"e" * 16, read_to=marks)
        case "started":
            return JobStarted(**base, config_digest=draw(st.text(max_size=3)))
        case "settings":
            return SettingsChanged(
                **base, generation=2, number=state.next_number, update_index=state.update_index(state.next_number),
                settings={"train.max_updates": draw(st.integers(1, 9))},
            )  # fmt: skip
        case "redrawn":
            letter = max(state.replayed, default=0) + 1
            return Redrawn(**base, letter=letter, draw=Draw(0, 1000 * letter), **plan)
        case "phase":
            return PhaseChanged(**base, phase=draw(st.sampled_from(["running", "paused"])), reason="x")
        case "drawn":
            start = state.next_ordinal
            return Drawn(**base, start=start, stop=start + draw(st.integers(1, 4)), **plan)
        case "dropped":
            draws = draw(st.lists(st.sampled_from(state.in_flight), unique=True, min_size=1))
            reason = draw(st.sampled_from(["stale", "failed"]))
            return Dropped(
                **base, draws=draws, reason=reason, lengths=[3] * len(draws), redraw=draw(st.booleans()), **plan
            )
        case "sealed":
            draws = draw(st.lists(st.sampled_from(state.in_flight), unique=True, min_size=1))
            number = state.next_number
            groups = [SealedGroup(d, "a", d.ordinal + 1, "d", 0, 1, [0.5, 1.0], 7, "w") for d in draws]
            return BatchSealed(
                **base, number=number, revision=state.revisions.get(number, 0) + 1,
                start_version=state.start_version(number), update_index=state.updates, groups=groups,
            )  # fmt: skip
        case "refused":
            batch = state.sealed[max(state.sealed)]
            bad = [group.draw for group in batch.groups if draw(st.booleans())]
            return BatchRefused(
                **base, number=batch.number, revision=batch.revision, bad=bad, reason="lost",
                redraw=draw(st.booleans()), **plan,
            )  # fmt: skip
        case "trained":
            assert next_sealed is not None
            return BatchTrained(
                **base, number=next_sealed.number, revision=next_sealed.revision,
                version=next_sealed.start_version + 1, digest=f"w{next_sealed.number}", trainer_epoch=epoch,
            )  # fmt: skip
        case "checkpointed":
            return Checkpointed(
                **base, number=state.last_trained, version=state.version, digest=state.digest, path="p",
                trainer_epoch=epoch, low_seq=draw(st.integers(0, 6)),
            )  # fmt: skip
    return LineageForked(
        **base, from_batch=draw(st.sampled_from(sorted(state.batches))), version=state.version + 1, digest="fork",
        reason="gone", trainer_epoch=epoch, **plan,
    )  # fmt: skip


@pytest.mark.long
@given(histories())
@settings(max_examples=60)
def test_a_snapshot_and_its_tail_fold_to_the_whole_ledger(events: list[Event]) -> None:
    everything = fold(events)
    for count in range(len(events) + 1):
        data = encode_snapshot(fold(events[:count]), job=JOB, seq=count, entry="e")
        snapshot, state = decode_snapshot(data, job=JOB)
        assert snapshot.seq == count
        assert fold(events[count:], state) == everything


@given(histories(), st.data())
def test_a_damaged_snapshot_is_refused_or_harmless(events: list[Event], data: st.DataObject) -> None:
    """A changed byte is either noticed, or does not change the decoded state."""
    expected = fold(events)
    damaged = bytearray(encode_snapshot(expected, job=JOB, seq=7, entry="e"))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    try:
        _, state = decode_snapshot(bytes(damaged), job=JOB)
    except ProtocolError:
        return
    assert state == expected


STARTED = fold([JobStarted(writer_epoch=3, time=0.0, config_digest="c")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fold": 0}, "made by fold 0"),
        ({"layout": "another"}, "made by fold"),
        ({"digest": "0" * 32}, "does not hash"),
    ],
)
def test_a_snapshot_of_another_version_or_job_is_refused(changes: dict[str, object], message: str) -> None:
    snapshot, envelope = unpack(encode_snapshot(STARTED, job=JOB, seq=1, entry="e"), Snapshot)
    other = msgspec.structs.replace(snapshot, **changes)
    with pytest.raises(ProtocolError, match=message):
        decode_snapshot(pack(other, job=JOB, epoch=envelope.epoch), job=JOB)
    with pytest.raises(ProtocolError, match="it is of job"):
        decode_snapshot(encode_snapshot(STARTED, job="job_other", seq=1, entry="e"), job=JOB)
    with pytest.raises(ProtocolError, match="not sound"):
        decode_snapshot(pack(snapshot, job=JOB, epoch=envelope.epoch + 1), job=JOB)
