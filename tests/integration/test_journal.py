"""The ledger on a real bus: snapshots are written, verified, ignored if they are wrong, and limited in number."""

from __future__ import annotations

import logging

import pytest

from penstock.services.coordinator.training import journal as journal_module
from penstock.services.coordinator.training.journal import KEEP, Journal, read_snapshots
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.snapshot import encode_snapshot
from penstock.shared.errors import Fenced
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.events import Checkpointed, Drawn, Event, JobStarted, decode_events, encode_events
from penstock.shared.protocol.parts import count_of
from penstock.shared.transport.bus import Bus

JOB = "job_journal"


def entry(number: int, *, path: str = "p", epoch: int = 1) -> list[Event]:
    """Return the events of the decision with this number."""
    base = {"writer_epoch": epoch, "time": 0.0}
    if not number:
        return [JobStarted(**base, config_digest="c")]
    checkpoint = Checkpointed(
        **base, number=0, version=0, digest="d", path=f"{path}{number}", trainer_epoch=1, low_seq=0
    )
    return [Drawn(**base, start=number - 1, stop=number, min_version=0, deadline=9.0), checkpoint]


async def write(bus: Bus, count: int, *, path: str = "p") -> LedgerState:
    """Append ``count`` decisions and write the due snapshots, as a leader does; return the state."""
    journal = Journal(bus, JOB)
    state = await journal.load()
    done = state.next_ordinal + state.started
    for number in range(done, done + count):
        events = entry(number, path=path)
        await journal.append(events)
        fold(events, state)
        if (save := journal.snapshot(state)) is not None:
            await save()
    return state


async def whole_fold(bus: Bus) -> LedgerState:
    messages = await bus.read(subjects.LEDGER, subjects.ledger(JOB))
    return fold(event for message in messages for event in decode_events(message.data))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a snapshot follow every tenth entry, however small the entries are."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_ENTRIES", 10)


async def covered(bus: Bus) -> list[int]:
    """Return the sequence numbers up to which snapshots cover the ledger, the highest first."""
    return [snapshot.seq for snapshot, _, _ in await read_snapshots(bus, JOB)]


@pytest.mark.usefixtures("often")
async def test_a_new_leader_starts_from_the_newest_snapshot(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    state = await write(bus, 95)
    assert len(await covered(bus)) == KEEP
    newest, older = await covered(bus)
    assert 0 < older < newest <= 95
    journal = Journal(bus, JOB)
    assert await journal.load() == state == await whole_fold(bus)
    await journal.append(entry(95))
    assert not caplog.records, "no snapshot was wrong"
    with pytest.raises(Fenced):
        await Journal(bus, JOB).append(entry(95, epoch=2))  # this journal has not read the ledger


async def ledger_of(bus: Bus) -> list[bytes]:
    return [message.data for message in await bus.read(subjects.LEDGER, subjects.ledger(JOB))]


async def test_a_repeated_append_after_a_lost_answer_is_one_entry(bus: Bus) -> None:
    """The ledger contains the entry, but its leader does not know that; the repeated append finds the entry."""
    journal = Journal(bus, JOB)
    await journal.load()
    first = await journal.append(entry(0))
    lost = await bus.publish(subjects.ledger(JOB), encode_events(entry(1)), expect_last_subject_seq=first)
    assert await journal.append(entry(1)) == lost
    assert await journal.append(entry(2)) == lost + 1, "the leader continues"
    assert await ledger_of(bus) == [encode_events(entry(number)) for number in range(3)]


async def test_a_leader_that_was_replaced_is_fenced_whatever_it_writes(bus: Bus) -> None:
    old, new = Journal(bus, JOB), Journal(bus, JOB)
    await old.load()
    await old.append(entry(0))
    await new.load()
    await new.append(entry(1, epoch=2))
    written = await ledger_of(bus)
    for late in (entry(1), entry(2)):  # the decision that epoch 2 wrote, and another one
        with pytest.raises(Fenced, match="somebody else"):
            await old.append(late)
    assert await ledger_of(bus) == written


async def test_a_new_leader_must_read_the_old_leaders_last_entry(bus: Bus) -> None:
    """The old leader's last entry counts; the new leader's append is refused until it has read that entry."""
    old, new = Journal(bus, JOB), Journal(bus, JOB)
    await old.load()
    await old.append(entry(0))
    await new.load()
    await old.append(entry(1))
    with pytest.raises(Fenced):
        await new.append(entry(1, epoch=2))
    again = Journal(bus, JOB)
    assert (await again.load()).next_ordinal == 1
    await again.append(entry(2, epoch=2))
    with pytest.raises(Fenced):
        await old.append(entry(2))


@pytest.mark.usefixtures("often")
async def test_snapshots_never_write_more_than_the_ledger(bus: Bus) -> None:
    """A snapshot is written once the decisions since the last one are as large as it, so the distances grow."""
    await write(bus, 120)
    ledger = await bus.read(subjects.LEDGER, subjects.ledger(JOB))
    newest, older = await covered(bus)
    between = sum(len(message.data) for message in ledger if older < message.seq <= newest)
    size = next(nbytes for snapshot, _, nbytes in await read_snapshots(bus, JOB) if snapshot.seq == older)
    assert between >= size


@pytest.mark.usefixtures("often")
async def test_unverifiable_snapshots_are_ignored_and_logged(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    state = await write(bus, 60)
    newest, older = await covered(bus)

    subject = subjects.snapshots(JOB)
    await bus.publish(subject, b"rubbish")
    wrong = fold(entry(0), LedgerState())
    await bus.publish(subject, encode_snapshot(wrong, job=JOB, seq=newest, entry="another ledger"))
    await bus.publish(subject, encode_snapshot(wrong, job=JOB, seq=10_000, entry="no such entry"))
    with caplog.at_level(logging.WARNING):
        assert await Journal(bus, JOB).load() == state
    text = caplog.text
    assert "not an envelope" in text
    assert "is of another ledger" in text

    for message in await bus.read(subjects.SNAPSHOTS, subject):
        await bus.delete_message(subjects.SNAPSHOTS, message.seq)
    assert await Journal(bus, JOB).load() == state, "without snapshots the fold starts at the first entry"

    ledger = await bus.read(subjects.LEDGER, subjects.ledger(JOB))
    at = next(message for message in ledger if message.seq == older)
    lie = encode_snapshot(wrong, job=JOB, seq=older, entry=journal_module.digest_of(at.data))
    await bus.publish(subject, lie)
    caplog.clear()
    assert await Journal(bus, JOB).load() == state, "a snapshot that contradicts later entries is ignored"
    assert "is wrong" in caplog.text


async def test_a_large_state_is_stored_in_parts(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_ENTRIES", 4)
    await write(bus, 3, path="x" * 700_000)
    state = await write(bus, 1, path="x" * 700_000)
    (message,) = await bus.read(subjects.SNAPSHOTS, subjects.snapshots(JOB))
    assert count_of(message.headers) == 2
    assert len(message.data) == MAX_INLINE_BYTES
    assert (await read_snapshots(bus, JOB))[0][1] == state
