"""Backups during writes: consistent, verified, and refused if they are damaged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.local.backup import load_backup, restore_files, restore_streams, take_backup
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.leader_rpc import LeaderRpc
from penstock.services.coordinator.training.journal import Journal
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.errors import ConfigError, Conflict, DataError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Checkpointed, LineageForked, encode_events
from penstock.shared.runtime.ledger import ledger_archive
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

JOB: dict[str, Any] = {
    "kind": "evaluation",
    "name": "kept",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "reward": {"scorers": [{"type": "exact"}]},
}
KEEP = 5


class Writer:
    """Writes like a leader and its workers: publishes groups and entries that refer to them, and removes old groups."""

    def __init__(self, bus: Bus, data_dir: Path) -> None:
        self._bus, self._folder = bus, data_dir / "checkpoints" / "job_a"
        self.count = 0

    async def run(self) -> None:
        groups: list[int] = []
        while True:
            self.count += 1
            groups.append(await self._bus.publish(subjects.experience("job_a"), b"x" * 20_000))
            saved = self._folder / f"{self.count:08d}-0123456789ab"
            saved.mkdir(parents=True)
            (saved / "weights").write_text(str(self.count))
            (saved / "COMMIT").write_text("digest")
            needed = groups[-KEEP:]
            await self._bus.publish(
                subjects.ledger("job_a"), json.dumps({"groups": needed, "checkpoint": saved.name}).encode()
            )
            if not self._bus.held:
                await self._bus.purge(subjects.EXPERIENCE, subjects.experience("job_a"), below_seq=needed[0])
            if self.count > 10 * KEEP:
                old = self._folder / f"{self.count - 10 * KEEP:08d}-0123456789ab"
                for name in ("COMMIT", "weights"):
                    (old / name).unlink(missing_ok=True)


@pytest.mark.long
async def test_a_backup_taken_during_writes_is_one_consistent_cut(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir, save = tmp_path / "data", Bus.save_stream
    data_dir.mkdir()
    seen: list[int] = []

    def slowly(self: Bus, stream: str) -> Any:
        """Save a stream after the writer has written much since the stream before."""

        async def parts() -> Any:
            goal = writer.count + 2 * KEEP
            while writer.count < goal:
                await asyncio.sleep(0.01)
            seen.append(writer.count)
            async for part in save(self, stream):
                yield part

        return parts()

    writer, line = Writer(bus, data_dir), LeaderRpc(bus, {})
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(writer.run()), tasks.create_task(line.serve())]
        while writer.count < 2 * KEEP:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(Bus, "save_stream", slowly)
        async with await Bus.connect(bus._connection._servers[0], name="backup") as other:
            await take_backup(other, data_dir, tmp_path / "backup")
        for task in running:
            task.cancel()
    assert len(seen) > 10
    assert not bus.held, "the leader may remove old groups again"

    manifest = load_backup(tmp_path / "backup")
    with NatsServer(tmp_path / "other") as server:
        async with await Bus.connect(server.url, name="restored") as restored:
            restore_files(tmp_path / "backup", manifest, tmp_path / "new")
            await restore_streams(restored, tmp_path / "backup", manifest, tmp_path / "new")
            entries = await restored.read(subjects.LEDGER, subjects.ledger("job_a"))
            groups = {m.seq for m in await restored.read(subjects.EXPERIENCE, subjects.experience("job_a"))}
            newest = json.loads(entries[-1].data)
            assert set(newest["groups"]) <= groups
            assert max(groups) <= newest["groups"][-1] + 10 * KEEP < writer.count, "nothing after the cut is restored"
            assert (tmp_path / "new" / "checkpoints" / "job_a" / newest["checkpoint"] / "COMMIT").exists()
            assert [m.seq for m in entries] == list(range(1, len(entries) + 1)), "sequence numbers stay the same"
            with pytest.raises(ConfigError, match="exists there"):
                await restore_streams(restored, tmp_path / "backup", manifest, tmp_path / "new")


async def test_restored_job_files_name_the_new_location_of_their_data(bus: Bus, tmp_path: Path) -> None:
    data_dir, rows = tmp_path / "data", tmp_path / "rows.jsonl"
    upload, model = data_dir / "files" / "file_a" / "rows", tmp_path / "model"
    for path in (rows, upload, model / "config.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"prompt": "1+1=", "answer": "2"}')
    sources = [{"type": "file", "path": str(path)} for path in (rows, upload)]
    spec = JOB | {"data": {"eval": sources}, "model": {"path": str(model)}}
    job = (await JobStore(bus).create(parse_job(spec))).id
    manifest = await take_backup(bus, data_dir, tmp_path / "backup")
    assert [(r.path, r.file is not None) for r in manifest.references] == [(str(model), False), (str(rows), True)]
    rows.unlink()
    (model / "config.json").unlink()
    model.rmdir()
    new = tmp_path / "new"
    with NatsServer(tmp_path / "other") as server:
        async with await Bus.connect(server.url, name="restored") as restored:
            restore_files(tmp_path / "backup", manifest, new)
            (note,) = await restore_streams(restored, tmp_path / "backup", manifest, new)
            assert f"needs {model}, which is not here" in note
            paths = [source["path"] for source in (await JobStore(restored).get(job)).spec["data"]["eval"]]
    assert paths == [str(new / "restored" / "0" / "rows.jsonl"), str(new / "files" / "file_a" / "rows")]
    assert len([*new.rglob("rows.jsonl"), *new.rglob("rows")]) == 2


async def test_a_backup_needs_no_checkpoint_that_a_fork_rolled_back(bus: Bus, tmp_path: Path) -> None:
    base: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}
    job = (await JobStore(bus).create(parse_job(JOB | {"data": {"eval": {"type": "addition"}}}))).id
    for number in (0, 4):
        path, fields = f"checkpoints/{job}/{number:08d}-0123456789ab", {"digest": "d", "trainer_epoch": 1, "low_seq": 0}
        saved = Checkpointed(**base, number=number, version=number, path=path, **fields)
        await bus.publish(subjects.ledger(job), encode_events([saved]))
    folder = tmp_path / "data" / "checkpoints" / job / "00000000-0123456789ab"
    folder.mkdir(parents=True)
    (folder / "COMMIT").write_text("digest")
    with pytest.raises(Conflict, match="00000004-0123456789ab was deleted"):
        await take_backup(bus, tmp_path / "data", tmp_path / "one")
    forked = LineageForked(
        **base, from_batch=3, version=5, digest="d", reason="r", trainer_epoch=1, min_version=0, deadline=0.0
    )
    await bus.publish(subjects.ledger(job), encode_events([forked]))
    manifest = await take_backup(bus, tmp_path / "data", tmp_path / "two")
    assert [file.path for file in manifest.files] == [f"files/checkpoints/{job}/{folder.name}/COMMIT"]


async def test_a_backup_needs_files_that_only_the_ledger_archive_names(bus: Bus, tmp_path: Path) -> None:
    """A checkpoint that only an archived entry names must be on disk, and so must the archive's segment."""
    data_dir, fields = tmp_path / "data", {"digest": "d", "trainer_epoch": 1, "low_seq": 0}
    job = (await JobStore(bus).create(parse_job(JOB | {"data": {"eval": {"type": "addition"}}}))).id
    folder = data_dir / "checkpoints" / job / "00000004-0123456789ab"
    journal = Journal(bus, job, archive=ledger_archive(data_dir))
    await journal.load()
    path = str(folder.relative_to(data_dir))
    end = await journal.append(
        [Checkpointed(writer_epoch=1, time=0.0, number=4, version=4, path=path, **fields)]  # type: ignore[arg-type]
    )
    await journal.archive(below=end + 1, least=1)
    assert await journal.name_segment()
    assert len(await bus.read(subjects.LEDGER, subjects.ledger(job))) == 1, "the entry is in the archive"
    with pytest.raises(Conflict, match="00000004-0123456789ab was deleted"):
        await take_backup(bus, data_dir, tmp_path / "one")
    folder.mkdir(parents=True)
    (folder / "COMMIT").write_text("digest")
    await take_backup(bus, data_dir, tmp_path / "two")
    (segment,) = (data_dir / "ledgers" / job).iterdir()
    segment.unlink()
    with pytest.raises(Conflict, match=r"segment 1 of the ledger of job .* is missing"):
        await take_backup(bus, data_dir, tmp_path / "three")


async def test_a_leader_that_cannot_hold_back_deletions_is_not_backed_up(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    async with await bus.serve(subjects.LEADER, LeaderRpc(bus, {})._answer):
        with pytest.raises(Conflict, match="another version"):
            await take_backup(bus, tmp_path / "data", tmp_path / "backup")


def shorten(folder: Path) -> None:
    stream = folder / "streams" / "KV_leases"
    stream.write_bytes(stream.read_bytes()[:-1])


def remove(folder: Path) -> None:
    (folder / "streams" / "LEDGER").unlink()


def unfinish(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(("damage", "error", "text"), [
    (shorten, DataError, "KV_leases was changed"), (remove, DataError, "LEDGER cannot be read"),
    (unfinish, ConfigError, "is no backup, or it was not finished"),
])  # fmt: skip
async def test_a_damaged_backup_is_refused(
    bus: Bus, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], text: str
) -> None:
    (tmp_path / "data").mkdir()
    await take_backup(bus, tmp_path / "data", tmp_path / "backup")
    assert load_backup(tmp_path / "backup").streams
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="is not empty"):
        await take_backup(bus, tmp_path / "data", tmp_path / "backup")
    damage(tmp_path / "backup")
    with pytest.raises(error, match=text):
        load_backup(tmp_path / "backup")
