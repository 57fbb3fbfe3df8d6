"""Buckets: compare-and-set, deletion, watching."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.shared.errors import Conflict, NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.transport import streams
from penstock.shared.transport.bus import Bus, Entry
from penstock.shared.transport.server import NatsServer


async def test_values_are_compared_and_set(bus: Bus) -> None:
    kv = bus.kv(subjects.POLICY)
    assert await kv.get("job_1") is None
    first = await kv.create("job_1", b"0")
    with pytest.raises(Conflict):
        await kv.create("job_1", b"0")
    second = await kv.update("job_1", b"1", first)
    with pytest.raises(Conflict):
        await kv.update("job_1", b"2", first)
    entry = await kv.get("job_1")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("job_1", b"1", second)
    assert await kv.put("job_1", b"3") > second


async def test_overwritten_values_are_gone_from_the_disk(bus: Bus, nats_server: NatsServer) -> None:
    def on_disk(text: bytes) -> bool:
        return any(text in path.read_bytes() for path in nats_server.directory.rglob("*.blk"))

    kv = bus.kv(subjects.EPISODES)
    first = await kv.create("a", b"what-somebody-said", keep_s=60)
    with pytest.raises(Conflict):
        await kv.overwrite("a", b"x", first + 1)
    assert on_disk(b"what-somebody-said")
    second = await kv.overwrite("a", b"nothing", first, keep_s=60)
    assert not on_disk(b"what-somebody-said")
    entry = await kv.get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"nothing", second)
    with pytest.raises(Conflict):
        await kv.overwrite("a", b"x", first)


async def test_values_in_a_bucket_of_an_earlier_version_can_be_overwritten(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"experience_bytes": 8 << 20, "stream_bytes": 8 << 20}
    async with await Bus.connect(nats_server.url, name="old") as bus:
        monkeypatch.setattr(streams, "ERASABLE", frozenset())
        await bus.ensure_streams(**sizes)
        revision = await bus.kv(subjects.EPISODES).create("a", b"1")
        monkeypatch.undo()
        await bus.ensure_streams(**sizes)
        await bus.kv(subjects.EPISODES).overwrite("a", b"2", revision)
        entry = await bus.kv(subjects.EPISODES).get("a")
        assert entry is not None
        assert entry.value == b"2"


async def test_a_deleted_key_can_be_created_again(bus: Bus) -> None:
    kv = bus.kv(subjects.POLICY)
    revision = await kv.create("a", b"1")
    with pytest.raises(Conflict):
        await kv.delete("a", revision=revision + 5)
    await kv.delete("a")
    assert await kv.get("a") is None
    assert await kv.keys() == []
    assert await kv.create("a", b"2") > revision
    with pytest.raises(Conflict):
        await kv.create("a", b"3")


async def test_one_of_many_concurrent_writers_wins(bus: Bus) -> None:
    kv = bus.kv(subjects.LEASES)
    results = await asyncio.gather(*(kv.create("x", b"%d" % i) for i in range(10)), return_exceptions=True)
    assert sum(isinstance(r, Conflict) for r in results) == 9


async def test_keys_are_listed_by_prefix(bus: Bus) -> None:
    kv = bus.kv(subjects.LEASES)
    for key in ("trainer.job_1", "trainer.job_2", "trainers.x", "trainer"):
        await kv.put(key, key.encode())
    await kv.delete("trainer.job_2")
    assert await kv.keys("trainer") == ["trainer", "trainer.job_1"]
    assert await kv.keys() == ["trainer", "trainer.job_1", "trainers.x"]
    assert [(e.key, e.value) for e in await kv.entries("trainer")] == [
        ("trainer.job_1", b"trainer.job_1"),
        ("trainer", b"trainer"),
    ]


async def test_bad_names_are_refused(bus: Bus) -> None:
    for key in ("", "a b", "a..b", ".a", "a.", "*", "a\n"):
        with pytest.raises(ProtocolError):
            await bus.kv(subjects.JOBS).put(key, b"")
    with pytest.raises(NotFound):
        await bus.kv("nope").keys()


async def collect(bus: Bus, n: int, seen: list[Entry], prefix: str = "", *, include_current: bool = True) -> None:
    async with contextlib.aclosing(bus.kv(subjects.JOBS).watch(prefix, include_current=include_current)) as changes:
        async for entry in changes:
            seen.append(entry)
            if len(seen) == n:
                return


async def begun(seen: list[Entry]) -> None:
    """Wait until a watch has shown the first present value."""
    async with asyncio.timeout(30):
        while not seen:
            await asyncio.sleep(0.01)


async def test_a_watch_shows_present_values_and_changes(bus: Bus) -> None:
    kv = bus.kv(subjects.JOBS)
    await kv.put("job_1", b"old")
    await kv.put("job_1", b"1")
    await kv.put("other.x", b"1")
    seen: list[Entry] = []
    watching = asyncio.create_task(collect(bus, 4, seen, "job_1"))
    await begun(seen)
    await kv.put("job_1.part", b"2")
    await kv.delete("job_1")
    await kv.put("job_12", b"not below the prefix")
    await kv.put("job_1", b"3")
    await asyncio.wait_for(watching, 30)
    assert [(e.key, e.value) for e in seen] == [
        ("job_1", b"1"), ("job_1.part", b"2"), ("job_1", None), ("job_1", b"3"),
    ]  # fmt: skip


async def test_a_watch_of_changes_only(bus: Bus) -> None:
    kv = bus.kv(subjects.JOBS)
    await kv.put("a", b"old")
    watch = kv.watch(include_current=False)
    await watch.start()
    await kv.put("a", b"new")
    assert (await asyncio.wait_for(anext(watch), 2)).value == b"new"
    await watch.aclose()


async def test_a_watch_heals_across_a_restart(bus: Bus, nats_server: NatsServer) -> None:
    kv = bus.kv(subjects.JOBS)
    await kv.put("a", b"0")
    seen: list[Entry] = []
    watching = asyncio.create_task(collect(bus, 3, seen))
    await begun(seen)
    nats_server.restart()
    await kv.put("a", b"1")
    await kv.put("b", b"2")
    await asyncio.wait_for(watching, 30)
    assert [(e.key, e.value) for e in seen] == [("a", b"0"), ("a", b"1"), ("b", b"2")]


async def test_values_survive_a_crash(bus: Bus, nats_server: NatsServer) -> None:
    kv = bus.kv(subjects.LEASES)
    revision = await kv.create("x", b"1")
    nats_server.restart()
    entry = await kv.get("x")
    assert entry is not None
    assert entry.revision == revision
    await kv.update("x", b"2", revision)


async def test_an_entry_vanishes_when_it_expires(bus: Bus) -> None:
    kv = bus.kv(subjects.EPISODES)
    first = await kv.create("job.short", b"0", keep_s=60.0)
    await kv.update("job.short", b"1", first, keep_s=0.1)
    await kv.create("job.long", b"2", keep_s=60.0)
    assert await kv.keys("job") == ["job.long", "job.short"]
    async with asyncio.timeout(30):
        while await kv.get("job.short") is not None:
            await asyncio.sleep(0.05)
    assert await kv.keys("job") == ["job.long"]
    await kv.create("job.short", b"3", keep_s=60.0)
