"""Old entries move from LEDGER to an archive: no crash loses an entry, and damage is detected and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.removal import delete_job
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.services import build_services
from penstock.services.coordinator.training import journal as journal_module
from penstock.services.coordinator.training.journal import Journal, archive_whole
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.retry import Retry
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ArchiveError, Fenced, StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Checkpointed, Drawn, Event, JobStarted, decode_events, encode_events
from penstock.shared.runtime.ledger import FileArchive, read_ledger
from penstock.shared.transport.bus import Bus

JOB = "job_archived"
CONFIG = JobConfig.parse(
    {
        "name": "archived",
        "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "train": {"batch_size": 16, "max_updates": 1},
    }
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let snapshots and segments follow after a few entries."""
    for name, value in {"SNAPSHOT_ENTRIES": 10, "MIN_SEGMENT_BYTES": 8_000, "SEGMENT_SHARE": 1 << 20}.items():
        monkeypatch.setattr(journal_module, name, value)
    monkeypatch.setattr(journal_module, "FREE_EVERY_S", 0.0)
    monkeypatch.setattr(journal_module, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def archive(tmp_path: Path) -> FileArchive:
    return FileArchive(tmp_path / "ledgers")


def decision(number: int, *, epoch: int = 1, pad: int = 200) -> list[Event]:
    base: dict[str, Any] = {"writer_epoch": epoch, "time": 0.0}
    if not number:
        return [JobStarted(**base, config_digest="c")]
    saved = Checkpointed(**base, number=0, version=0, digest="d", path="x" * pad, trainer_epoch=1, low_seq=0)
    return [Drawn(**base, start=number - 1, stop=number, min_version=0, deadline=9.0), saved]


class Leader:
    """Appends decisions as a runner does, and writes snapshots and segments in between."""

    def __init__(self, bus: Bus, archive: FileArchive | None, *, job: str = JOB, epoch: int = 1) -> None:
        self.journal = Journal(bus, job, archive=archive)
        self.state, self.epoch = LedgerState(), epoch

    async def load(self) -> LedgerState:
        self.state = await self.journal.load()
        return self.state

    async def write(self, count: int, *, pad: int = 200, keeps_up: bool = True) -> None:
        done = self.state.next_ordinal + self.state.started
        for number in range(done, done + count):
            events = decision(number, epoch=self.epoch, pad=pad)
            await self.journal.append(events)
            fold(events, self.state)
            if (save := self.journal.snapshot(self.state)) is not None:
                await save()
            if keeps_up and (work := self.journal.upkeep()) is not None:
                await work()


async def numbers(bus: Bus, archive: FileArchive, job: str = JOB) -> list[int]:
    """Return the numbers of the decisions that a reader finds; entries without events are left out."""
    entries = [decode_events(entry.data) for entry in await read_ledger(bus, job, archive)]
    return [0 if isinstance(events[0], JobStarted) else events[0].stop for events in entries if events]  # type: ignore[attr-defined]


def segments(tmp_path: Path, job: str = JOB) -> list[Path]:
    return sorted((tmp_path / "ledgers" / job).glob("*"))


async def test_old_entries_leave_the_stream_and_every_reader_finds_them(
    bus: Bus, archive: FileArchive, tmp_path: Path
) -> None:
    leader = Leader(bus, archive)
    await leader.load()
    await leader.write(300)
    there = await bus.read(subjects.LEDGER, subjects.ledger(JOB))
    assert len(there) < 130, "the rest is archived"
    assert len(segments(tmp_path)) >= 3
    assert await numbers(bus, archive) == list(range(300))
    again = Leader(bus, archive, epoch=2)
    assert await again.load() == leader.state
    await again.write(100)
    await bus.purge(subjects.SNAPSHOTS, subjects.snapshots(JOB))
    assert await Journal(bus, JOB, archive=archive).load() == again.state, "without a snapshot all of it is folded"
    assert await numbers(bus, archive) == list(range(400))
    with pytest.raises(ArchiveError, match="stands in an archive"):
        await read_ledger(bus, JOB, None)


@pytest.mark.long
@pytest.mark.parametrize("died", ["before the file", "before the entry", "before the purge"])
async def test_a_successor_has_every_entry_once_at_whatever_step_the_leader_dies(
    bus: Bus, archive: FileArchive, tmp_path: Path, died: str
) -> None:
    first = Leader(bus, archive)
    await first.load()
    await first.write(90, keeps_up=False)
    if died != "before the file":
        await first.journal.archive()
        assert len(segments(tmp_path)) == 1
    else:
        (tmp_path / "ledgers" / JOB).mkdir(parents=True)
        (tmp_path / "ledgers" / JOB / "00000001-9-ab.7.part").write_bytes(b"half of")
    if died == "before the purge":
        await first.write(1, keeps_up=False)
    count = 91 if died == "before the purge" else 90
    assert len(await bus.read(subjects.LEDGER, subjects.ledger(JOB))) == count, "nothing is purged yet"
    assert await numbers(bus, archive) == list(range(count))
    second = Leader(bus, archive, epoch=2)
    assert await second.load() == first.state
    await second.write(150)
    assert await numbers(bus, archive) == list(range(count + 150))
    assert len(await bus.read(subjects.LEDGER, subjects.ledger(JOB))) < 130
    assert await Leader(bus, archive).load() == second.state
    with pytest.raises(Fenced):
        await first.journal.append(decision(count))


async def test_a_leader_that_was_replaced_names_no_segment(bus: Bus, archive: FileArchive) -> None:
    old, new = Leader(bus, archive), Leader(bus, archive, epoch=2)
    await old.load()
    await old.write(90, keeps_up=False)
    await old.journal.archive()  # it stops here, and continues below
    await new.load()
    await new.journal.archive(below=40, least=1)
    assert await new.journal.name_segment()
    there = await bus.read(subjects.LEDGER, subjects.ledger(JOB))
    with pytest.raises(Fenced):
        await old.journal.name_segment()
    assert await bus.read(subjects.LEDGER, subjects.ledger(JOB)) == there
    await new.write(100)
    assert await numbers(bus, archive) == list(range(190)), "the old leader's entry is not read"


async def test_two_leaders_that_archive_the_same_entries_are_distinguished(bus: Bus, archive: FileArchive) -> None:
    old, new = Leader(bus, archive), Leader(bus, archive, epoch=2)
    await old.load()
    await old.write(30, keeps_up=False)
    await new.load()
    for leader in (old, new):
        await leader.journal.archive(below=20, least=1)
    assert await new.journal.name_segment()
    with pytest.raises(Fenced):
        await old.journal.name_segment()  # an equal entry is there, by the other leader


async def test_a_repeated_append_finds_its_entry_despite_a_new_segment(bus: Bus, archive: FileArchive) -> None:
    leader = Leader(bus, archive)
    await leader.load()
    await leader.write(30, keeps_up=False)
    events = decision(30)
    headers = {"Penstock-Writer": leader.journal._writer}
    lost = await bus.publish(subjects.ledger(JOB), encode_events(events), headers=headers)
    await leader.journal.archive(below=20, least=1)
    assert await leader.journal.append(events) == lost
    await leader.journal.append(decision(31))
    assert await numbers(bus, archive) == list(range(32))
    (newest,) = [m for m in await bus.read(subjects.LEDGER, subjects.ledger(JOB)) if m.seq == lost + 1]
    assert newest.headers["Penstock-Archived"].startswith("00000001-"), "the next entry names it"


def truncate(files: list[Path]) -> None:
    files[1].write_bytes(files[1].read_bytes()[:-7])


def edit(files: list[Path]) -> None:
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 1
    files[1].write_bytes(bytes(data))


def swap(files: list[Path]) -> None:
    one, two = files[1].read_bytes(), files[2].read_bytes()
    files[1].write_bytes(two)
    files[2].write_bytes(one)


def remove(files: list[Path]) -> None:
    files[1].unlink()


@pytest.mark.long
@pytest.mark.parametrize(("damage", "text"), [
    (truncate, "segment 2 .* was changed"), (edit, "segment 2 .* was changed"), (swap, "segment 3 .* was changed"),
    (remove, "segment 2 .* is missing"),
])  # fmt: skip
async def test_a_damaged_archive_is_seen_and_named(
    bus: Bus, archive: FileArchive, tmp_path: Path, damage: Callable[[list[Path]], None], text: str
) -> None:
    store = JobStore(bus)
    job = (await store.create(CONFIG)).id
    services = build_services(bus, store, Members(), {}, ServiceSettings(data_dir=tmp_path))
    leader = Leader(bus, archive, job=job)
    await leader.load()
    await leader.write(250)
    whole = await services.diagnosis.audit(job)
    assert (whole["ok"], whole["equation"]["drawn"]) == (True, 249)
    damage(segments(tmp_path, job))
    with pytest.raises(ArchiveError, match=text):
        await read_ledger(bus, job, archive)
    report = await services.diagnosis.audit(job)
    assert [check["name"] for check in report["checks"] if not check["ok"]] == ["archive"]
    assert await Leader(bus, archive, job=job).load() == leader.state, "a leader needs no more than a snapshot"


async def test_readers_find_every_entry_while_old_ones_are_archived(bus: Bus, archive: FileArchive) -> None:
    leader = Leader(bus, archive)
    await leader.load()
    writing = asyncio.create_task(leader.write(200))
    reads = 0
    while not writing.done():
        found = await numbers(bus, archive)
        assert found == list(range(len(found)))
        reads += 1
    await writing
    assert reads > 3


@pytest.mark.long
async def test_a_job_without_an_archive_waits_at_its_budget_and_others_go_on(bus: Bus, tmp_path: Path) -> None:
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=1 << 20)
    (tmp_path / "file").write_text("no directory can be made here")
    greedy, modest = Leader(bus, FileArchive(tmp_path / "file" / "ledgers")), Leader(bus, None, job="job_modest")
    greedy.journal.retry = retry = Retry(JOB)
    for leader in (greedy, modest):
        await leader.load()
    writing = asyncio.create_task(greedy.write(300, pad=5000))
    async with asyncio.timeout(60):
        while (blocked := retry.blocked) is None:
            assert not writing.done()
            await asyncio.sleep(0.02)
    assert "bytes of LEDGER are of this job, which may have 131072" in blocked.why
    assert "its archive cannot be written" in blocked.why
    await modest.write(50, pad=5000)
    assert not writing.done()
    (tmp_path / "file").unlink()
    await asyncio.wait_for(writing, 60)
    assert await numbers(bus, FileArchive(tmp_path / "file" / "ledgers")) == list(range(300))
    assert len(await bus.read(subjects.LEDGER, subjects.ledger("job_modest"))) == 50


@pytest.mark.long
async def test_jobs_write_many_times_what_the_ledger_holds(bus: Bus, archive: FileArchive) -> None:
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=1 << 20)
    leaders = [Leader(bus, archive, job=f"job_{number}") for number in range(3)]
    for leader in leaders:
        await leader.load()
    await asyncio.wait_for(asyncio.gather(*(leader.write(150, pad=5000) for leader in leaders)), 90)
    for number, leader in enumerate(leaders):
        assert await numbers(bus, archive, f"job_{number}") == list(range(150))
        assert await Leader(bus, archive, job=f"job_{number}").load() == leader.state


async def test_a_finished_ledger_is_archived_whole_and_deleted_with_its_job(
    bus: Bus, archive: FileArchive, tmp_path: Path
) -> None:
    store = JobStore(bus)
    job = (await store.create(CONFIG)).id
    leader = Leader(bus, archive, job=job)
    await leader.load()
    await leader.write(120)
    await store.set_status(job, phase="succeeded")
    await archive_whole(bus, job, archive, least=1 << 30)
    assert len(await bus.read(subjects.LEDGER, subjects.ledger(job))) > 1, "too few bytes for a segment"
    for _ in range(2):
        await archive_whole(bus, job, archive, least=1)
        (last,) = await bus.read(subjects.LEDGER, subjects.ledger(job))
        assert last.data == encode_events([])
    await bus.purge(subjects.SNAPSHOTS, subjects.snapshots(job))
    assert await Leader(bus, archive, job=job).load() == leader.state
    await delete_job(bus, store, job, checkpoints=None, archive=archive)
    assert not (tmp_path / "ledgers" / job).exists()


async def test_a_ledger_that_other_jobs_filled_is_reported(bus: Bus, archive: FileArchive) -> None:
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=1 << 20)
    leader = Leader(bus, archive)
    await leader.load()
    await leader.write(1)
    for nbytes in (10_000, 100, 1):
        with pytest.raises(StreamFull):
            while True:
                await bus.publish(subjects.ledger("other"), b"x" * nbytes)
    blocked = asyncio.create_task(leader.write(1))
    async with asyncio.timeout(30):
        while (found := leader.journal.retry.blocked) is None:
            await asyncio.sleep(0.02)
    assert "stream LEDGER is full" in found.why
    await bus.purge(subjects.LEDGER, subjects.ledger("other"))
    await asyncio.wait_for(blocked, 30)
