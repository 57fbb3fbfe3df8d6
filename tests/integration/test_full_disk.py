"""A really full disk under a real server: writes are refused, the reason is reported, and work continues afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.local import Stack, StackOptions, StreamSizes
from penstock.services.coordinator.queries.health import WriteProbe
from penstock.shared.errors import DiskFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.jetstream import is_disk_full, raise_error
from penstock.shared.transport.server import NatsServer

EXPERIENCE = subjects.experience("job_a")
SIZES = StreamSizes(32 << 20, 2 << 20)
DISK_MIB = 96
PAYLOAD = os.urandom(200_000)
NOBODY = dict.fromkeys(("coordinator", "reward", "env", "rollout", "trainer"), 0)

Disk = Callable[..., Path]
Fill = Callable[[Path], Path]


def test_a_full_disk_is_recognized_by_the_end_of_the_servers_message() -> None:
    error = {"code": 503, "err_code": 10077, "description": "write /data/1.blk: no space left on device"}
    assert is_disk_full(error)
    assert is_disk_full({"description": "write /data/1.blk: disk quota exceeded"})
    assert not is_disk_full({"description": "maximum bytes exceeded"})
    with pytest.raises(DiskFull, match=r"purge: the disk of NATS is full: write /data/1\.blk"):
        raise_error(error, "purge")


async def ensure(bus: Bus) -> None:
    await bus.ensure_streams(experience_bytes=SIZES.experience_bytes, stream_bytes=SIZES.stream_bytes)


async def stored(bus: Bus) -> list[str]:
    """Return the ids of the messages in EXPERIENCE, after a check that they are whole."""
    messages = await bus.read(subjects.EXPERIENCE, EXPERIENCE)
    assert all(message.data == PAYLOAD for message in messages)
    return [message.headers["Nats-Msg-Id"] for message in messages]


async def test_a_full_disk_is_reported_until_the_server_is_restarted(disk: Disk, fill: Fill) -> None:
    folder = disk(DISK_MIB)
    with NatsServer(folder / "nats", max_file_store=SIZES.reserved_bytes) as server:
        async with await Bus.connect(server.url, name="test") as bus:
            await ensure(bus)
            assert await WriteProbe(bus, "before", server.monitor_url).flaw(1.0) == ""
            for number in range(5):
                await bus.publish(EXPERIENCE, PAYLOAD, msg_id=f"before-{number}")
            ballast = fill(folder)
            for attempt in (
                bus.publish(EXPERIENCE, PAYLOAD, msg_id="one", deadline_s=0.3),
                bus.publish_many([Outgoing(EXPERIENCE, PAYLOAD, {}, f"many-{n}") for n in range(3)], deadline_s=0.3),
            ):
                with pytest.raises(Unavailable):
                    await attempt
            assert "EXPERIENCE' write error" in await WriteProbe(bus, "meanwhile", server.monitor_url).flaw(0.5)
            assert "no space left on device" in server.flaw()
            ballast.unlink()
            with pytest.raises(Unavailable, match="a write failed, say on a full disk"):
                await bus.publish(EXPERIENCE, PAYLOAD, msg_id="later", deadline_s=0.3)
            server.restart()
            assert server.flaw() == ""
            assert await WriteProbe(bus, "after", server.monitor_url).flaw(1.0) == ""
            await bus.publish(EXPERIENCE, PAYLOAD, msg_id="after", deadline_s=10)
            assert await stored(bus) == [*(f"before-{number}" for number in range(5)), "after"]


@pytest.mark.long
async def test_a_stack_goes_on_once_there_is_room(disk: Disk, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.local.child.DISK_POLL_S", 0.1)
    folder, messages = disk(DISK_MIB), list[str]()
    options = StackOptions(data_dir=folder / "data", workers=NOBODY, environment=SIZES.variables)
    async with Stack(options, messages.append) as stack:
        first, url = stack.processes["nats"], stack._environment("operator", 1, 2)["PENSTOCK_NATS_URL"]
        async with await Bus.connect(url, name="publisher") as bus:
            await ensure(bus)
            acknowledged: list[str] = []

            async def publish() -> None:
                for number in range(40):
                    await bus.publish(EXPERIENCE, PAYLOAD, msg_id=str(number), deadline_s=30)
                    acknowledged.append(str(number))
                    await asyncio.sleep(0.01)

            publishing = asyncio.create_task(publish())
            async with asyncio.timeout(40):
                while len(acknowledged) < 5:
                    await asyncio.sleep(0.01)
                ballast = fill(folder)
                while not any("EXPERIENCE' write error" in line for line in messages):
                    await asyncio.sleep(0.05)
                assert not publishing.done()
                await asyncio.sleep(0.5)
                assert stack.processes["nats"] == first, "the server is not restarted while there is no room"
                ballast.unlink()
                await publishing
            assert await stored(bus) == acknowledged == [str(number) for number in range(40)]
        assert stack.processes["nats"] != first
        assert stack.restarts == 1
