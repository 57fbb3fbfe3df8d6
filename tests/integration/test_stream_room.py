"""Sizes of streams, from settings, existing streams or free disk space; NATS gets their sum as its limit."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.demo.command import demo_options
from penstock.cli.deployment.machine import DEMO_STREAMS
from penstock.local import LARGEST, SMALLEST, Stack, StackOptions, StreamSizes, plan_room
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.jetstream import call
from penstock.shared.transport.server import NatsServer
from penstock.shared.transport.streams import (
    AUDIT_BYTES,
    BUCKET_BYTES,
    BUCKETS,
    PARTIAL_BYTES,
    SNAPSHOT_BYTES,
    STREAMS,
    VIDEO_BYTES,
)

GIB, MIB = 1 << 30, 1 << 20
SMALL = StreamSizes(8 * MIB, 4 * MIB)
NOBODY = dict.fromkeys(("coordinator", "reward", "env", "rollout", "trainer"), 0)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Set ``free["bytes"]`` to the free bytes of every disk."""
    found = {"bytes": 100 * GIB}
    monkeypatch.delenv("PENSTOCK_EXPERIENCE_BYTES", raising=False)
    monkeypatch.delenv("PENSTOCK_STREAM_BYTES", raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=found["bytes"], total=100 * GIB))
    return found


def max_storage(monitor_url: str) -> int:
    with urllib.request.urlopen(f"{monitor_url}/jsz?config=1", timeout=5) as answer:
        return int(json.load(answer)["config"]["max_storage"])


async def sizes_of(bus: Bus) -> StreamSizes:
    return StreamSizes(
        (await bus.stream_state(subjects.EXPERIENCE)).max_bytes, (await bus.stream_state(subjects.LEDGER)).max_bytes
    )


async def ensure(bus: Bus, sizes: StreamSizes) -> None:
    await bus.ensure_streams(experience_bytes=sizes.experience_bytes, stream_bytes=sizes.stream_bytes)


def test_the_sum_counts_every_stream_and_bucket() -> None:
    defaults = ServiceSettings.model_fields
    assert LARGEST.stream_bytes == defaults["stream_bytes"].default == GIB
    others = len(STREAMS) - 5  # without EXPERIENCE, SNAPSHOTS, AUDIT, VIDEOS and PARTIAL
    rest = SNAPSHOT_BYTES + AUDIT_BYTES + VIDEO_BYTES + PARTIAL_BYTES + len(BUCKETS) * BUCKET_BYTES
    assert LARGEST.reserved_bytes == LARGEST.experience_bytes + others * GIB + rest
    assert SMALLEST.reserved_bytes == 256 * MIB + (others + 1 + len(BUCKETS)) * 64 * MIB


def test_the_demo_fits_where_doctor_says_so(free: dict[str, int], tmp_path: Path) -> None:
    free["bytes"] = 3 * GIB
    options = demo_options(tmp_path)
    assert plan_room(tmp_path, options.environment, largest=options.largest).sizes == DEMO_STREAMS
    free["bytes"] = 2 * GIB
    assert plan_room(tmp_path, options.environment, largest=options.largest).sizes == SMALLEST


@pytest.mark.parametrize(
    ("nbytes", "sizes"),
    [
        (100 * GIB, LARGEST),
        (LARGEST.reserved_bytes, StreamSizes(2 * GIB, GIB // 2)),
        (15 * GIB, StreamSizes(2 * GIB, GIB // 2)),
        (5 * GIB, StreamSizes(GIB // 2, GIB // 8)),
        (2 * GIB, SMALLEST),
    ],
)
def test_streams_are_sized_for_the_disk(free: dict[str, int], tmp_path: Path, nbytes: int, sizes: StreamSizes) -> None:
    free["bytes"] = nbytes
    room = plan_room(tmp_path / "nats" / "store", {})
    assert room.sizes == sizes
    assert room.max_file_store == sizes.reserved_bytes <= 0.75 * nbytes
    assert room.fits


def test_too_little_room_is_an_error_with_numbers(free: dict[str, int], tmp_path: Path) -> None:
    free["bytes"] = 2 * GIB - 4 * MIB
    with pytest.raises(ConfigError, match=r"has 2,044 MiB free, and the streams need 2,048 MiB.*--data-dir"):
        plan_room(tmp_path, {})


def test_sizes_in_the_environment_are_used(free: dict[str, int], tmp_path: Path) -> None:
    free["bytes"] = 200 * MIB
    assert plan_room(tmp_path, SMALL.variables).sizes == SMALL
    one = plan_room(tmp_path, {"PENSTOCK_STREAM_BYTES": str(MIB)}, largest=StreamSizes(128 * MIB, 128 * MIB))
    assert one.sizes == StreamSizes(128 * MIB, MIB)
    with pytest.raises(ConfigError, match="has 200 MiB free"):
        plan_room(tmp_path, {**SMALL.variables, "PENSTOCK_EXPERIENCE_BYTES": str(GIB)})
    with pytest.raises(ConfigError, match="PENSTOCK_STREAM_BYTES"):
        plan_room(tmp_path, {"PENSTOCK_STREAM_BYTES": "much"})


async def test_nats_has_room_for_the_streams_and_no_more(store_dir: Path) -> None:
    with NatsServer(store_dir / "nats", max_file_store=SMALL.reserved_bytes) as server:
        assert await asyncio.to_thread(max_storage, server.monitor_url) == SMALL.reserved_bytes
        async with await Bus.connect(server.url, name="test") as bus:
            await ensure(bus, SMALL)
            await ensure(bus, SMALL)
            assert await sizes_of(bus) == SMALL
            with pytest.raises(ConfigError, match="raise max_file_store"):
                await ensure(bus, StreamSizes(SMALL.experience_bytes + MIB, SMALL.stream_bytes))


async def test_a_deployment_keeps_the_sizes_of_its_streams(free: dict[str, int], store_dir: Path) -> None:
    existing = StreamSizes(16 * MIB, 8 * MIB)
    with NatsServer(store_dir / "nats") as server:
        store = server.store
        async with await Bus.connect(server.url, name="test") as bus:
            await ensure(bus, existing)
            for number in range(3):
                await bus.publish(subjects.ledger("job_a"), bytes(900_000), msg_id=str(number))
    free["bytes"] = 50 * MIB
    room = plan_room(store, {})
    assert room.sizes == existing
    assert room.max_file_store == existing.reserved_bytes
    assert not room.fits, "the disk is smaller than the streams may grow, and the summary names that"
    assert "50 MiB free" in room.summary
    smaller = plan_room(store, SMALL.variables)
    assert smaller.sizes == SMALL
    assert smaller.max_file_store == existing.reserved_bytes, (
        "the server counts the present sizes until they are changed"
    )
    with NatsServer(store_dir / "nats", max_file_store=smaller.max_file_store) as server:
        async with await Bus.connect(server.url, name="test") as bus:
            assert await sizes_of(bus) == existing
            await ensure(bus, SMALL)
            assert await sizes_of(bus) == SMALL
            assert len(await bus.read(subjects.LEDGER, subjects.ledger("job_a"))) == 3


async def test_a_smaller_size_drops_nothing(bus: Bus) -> None:
    for _ in range(3):
        await bus.publish(subjects.ledger("job_a"), bytes(900_000))
    with pytest.raises(ConfigError, match=r"LEDGER holds \d+ bytes, more than the 2097152"):
        await bus.ensure_streams(experience_bytes=64 * MIB, stream_bytes=2 * MIB)
    assert (await bus.stream_state(subjects.LEDGER)).messages == 3


async def test_snapshots_above_their_new_share_keep_their_room(bus: Bus) -> None:
    """In an earlier version the share was larger; an upgraded coordinator must start all the same."""
    before = (await bus.stream_state(subjects.SNAPSHOTS)).max_bytes
    for _ in range(3):
        await bus.publish(subjects.snapshots("job_a"), bytes(900_000))
    await bus.ensure_streams(experience_bytes=64 * MIB, stream_bytes=8 * MIB)
    state = await bus.stream_state(subjects.SNAPSHOTS)
    assert (state.max_bytes, state.messages) == (before, 3)
    assert (await bus.stream_state(subjects.LEDGER)).max_bytes == 8 * MIB
    await bus.purge(subjects.SNAPSHOTS, subjects.snapshots("job_a"))
    await bus.ensure_streams(experience_bytes=64 * MIB, stream_bytes=8 * MIB)
    assert (await bus.stream_state(subjects.SNAPSHOTS)).max_bytes == 2 * MIB


async def test_a_stack_passes_the_sizes_to_nats_and_the_services(free: dict[str, int], store_dir: Path) -> None:
    free["bytes"] = 5 * GIB
    messages: list[str] = []
    options = StackOptions(data_dir=store_dir / "data", workers=NOBODY)
    async with Stack(options, messages.append) as stack:
        given = stack._environment("rollout-0", 1, 2)
        sizes = StreamSizes(int(given["PENSTOCK_EXPERIENCE_BYTES"]), int(given["PENSTOCK_STREAM_BYTES"]))
        assert sizes == StreamSizes(GIB // 2, GIB // 8)
        async with await Bus.connect(stack._environment("operator", 1, 2)["PENSTOCK_NATS_URL"], name="test") as bus:
            await ensure(bus, sizes)
            info: dict[str, Any] = await call(bus._connection, "INFO", deadline_s=5, what="the account")
            assert info["reserved_storage"] == sizes.reserved_bytes
        assert await asyncio.to_thread(max_storage, given["PENSTOCK_NATS_MONITOR_URL"]) == sizes.reserved_bytes
    assert "EXPERIENCE 512 MiB, others 128 MiB each" in messages[0]


async def test_a_stack_without_room_starts_nothing(free: dict[str, int], store_dir: Path) -> None:
    free["bytes"] = GIB
    stack = Stack(StackOptions(data_dir=store_dir / "data", workers=NOBODY))
    with pytest.raises(ConfigError, match=r"has 1,024 MiB free, and the streams need 2,048 MiB"):
        async with stack:
            pass
    assert stack.processes == {}
