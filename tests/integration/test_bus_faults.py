"""The bus when the server dies, hangs or restarts, and when our own code misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.shared.errors import ConfigError, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.server import NatsServer

JOB = "job_1"
EXPERIENCE, TICKETS = subjects.experience(JOB), subjects.tickets(JOB)


@contextlib.asynccontextmanager
async def crashing(server: NatsServer, *, after_s: float = 0.1, down_s: float = 0.3) -> AsyncIterator[None]:
    """Kill the server with SIGKILL inside the block, and start it again on the same store."""

    async def crash() -> None:
        await asyncio.sleep(after_s)
        server.kill()
        await asyncio.sleep(down_s)
        server.start()

    task = asyncio.create_task(crash())
    yield
    await task


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what}: not within 30 s")


async def steadily(n: int, action: Callable[[int], Awaitable[object]]) -> None:
    for i in range(n):
        await action(i)
        await asyncio.sleep(0.002)


async def test_nothing_published_is_lost_or_doubled(bus: Bus, nats_server: NatsServer) -> None:
    async with crashing(nats_server):
        await steadily(200, lambda i: bus.publish(EXPERIENCE, b"%d" % i, deadline_s=5))
    assert [m.data for m in await bus.read(subjects.EXPERIENCE, EXPERIENCE)] == [b"%d" % i for i in range(200)]
    assert bus.reconnects == 1


async def test_batches_stay_whole(bus: Bus, nats_server: NatsServer) -> None:
    def batch(i: int) -> list[Outgoing]:
        return [Outgoing(EXPERIENCE, b"%d.%d" % (i, part), {}, f"{i}.{part}") for part in range(4)]

    async with crashing(nats_server):
        await steadily(100, lambda i: bus.publish_many(batch(i), deadline_s=5))
    expected = [m.data for i in range(100) for m in batch(i)]
    assert [m.data for m in await bus.read(subjects.EXPERIENCE, EXPERIENCE)] == expected


async def test_a_follower_misses_and_repeats_nothing(bus: Bus, nats_server: NatsServer) -> None:
    seen: list[bytes] = []

    async def follow() -> None:
        async with contextlib.aclosing(bus.follow(subjects.EXPERIENCE, EXPERIENCE)) as feed:
            async for message in feed:
                seen.append(message.data)
                if len(seen) == 200:
                    return

    following = asyncio.create_task(follow())
    async with await Bus.connect(nats_server.url, name="publisher") as other, crashing(nats_server):
        await steadily(200, lambda i: other.publish(EXPERIENCE, b"%d" % i, deadline_s=5))
    await asyncio.wait_for(following, 30)
    assert seen == [b"%d" % i for i in range(200)]


async def test_reading_survives_a_restart_in_the_middle(bus: Bus, nats_server: NatsServer) -> None:
    await bus.publish_many([Outgoing(EXPERIENCE, b"%d" % i) for i in range(900)])
    seen = []
    async for message in bus.scan(subjects.EXPERIENCE, EXPERIENCE):
        seen.append(message.data)
        if len(seen) == 300:
            nats_server.restart()
    assert seen == [b"%d" % i for i in range(900)]


async def test_a_follower_outlives_a_deleted_consumer(bus: Bus, nats_server: NatsServer) -> None:
    async with contextlib.aclosing(bus.follow(subjects.EXPERIENCE, EXPERIENCE)) as feed:
        await bus.publish(EXPERIENCE, b"0")
        assert (await asyncio.wait_for(anext(feed), 2)).data == b"0"
        await bus.delete_consumer(subjects.EXPERIENCE, feed._consumer)
        await bus.publish(EXPERIENCE, b"1")
        assert (await asyncio.wait_for(anext(feed), 4)).data == b"1"


async def test_all_work_is_done_across_a_restart(bus: Bus, nats_server: NatsServer) -> None:
    for i in range(100):
        await bus.publish(TICKETS, b"%d" % i)
    done: set[bytes] = set()
    puller = await bus.pull(subjects.TICKETS, TICKETS, "workers", ack_wait_s=0.5)
    async with puller, crashing(nats_server, after_s=0.05, down_s=0.2):
        start = time.monotonic()
        while len(done) < 100:
            assert time.monotonic() - start < 30, f"{len(done)} of 100 after 30 s"
            for delivery in await puller.fetch(2, 1.0):
                await asyncio.sleep(0.002)
                done.add(delivery.data)
                await delivery.ack()


async def test_fetch_notices_a_restart_at_once(bus: Bus, nats_server: NatsServer) -> None:
    async with await bus.pull(subjects.TICKETS, TICKETS, "workers", ack_wait_s=5) as puller:
        waiting = asyncio.create_task(puller.fetch(1, 40.0))
        await asyncio.sleep(0.1)
        nats_server.restart()
        start = time.monotonic()
        await bus.publish(TICKETS, b"x")
        assert len(await waiting) == 1
        assert time.monotonic() - start < 20


async def test_acknowledgements_during_an_outage_are_sent_later(bus: Bus, nats_server: NatsServer) -> None:
    async with await bus.pull(subjects.TICKETS, TICKETS, "workers", ack_wait_s=30) as puller:
        await bus.publish(TICKETS, b"x")
        (delivery,) = await puller.fetch(1, 1.0)
        await asyncio.sleep(0.4)  # a crash of the server loses younger leases
        nats_server.kill()
        await until(lambda: not bus.connected, "the loss is noticed")
        await delivery.ack()
        await delivery.in_progress()
        assert await puller.fetch(1, 0.2) == []
        nats_server.start()
        await bus.wait_connected(3)
        assert await puller.fetch(1, 0.3) == []
        assert (await bus.stream_state(subjects.TICKETS)).messages == 0


async def test_notifications_and_requests_fail_at_once_while_disconnected(bus: Bus, nats_server: NatsServer) -> None:
    nats_server.kill()
    await until(lambda: not bus.connected, "the loss is noticed")
    start = time.monotonic()
    with pytest.raises(Unavailable, match="not connected"):
        await bus.notify("heartbeat.x.y", b"")
    with pytest.raises(Unavailable):
        await bus.request("score.x", b"", deadline_s=60)
    with pytest.raises(Unavailable):
        await bus.rtt()
    assert time.monotonic() - start < 20
    with pytest.raises(Unavailable, match=nats_server.url):
        await bus.publish(EXPERIENCE, b"", deadline_s=0.3)
    nats_server.start()
    await bus.wait_connected(3)
    await bus.rtt()
    assert await bus.read(subjects.EXPERIENCE, EXPERIENCE) == [], "the failed publish was not kept and sent later"


async def test_subscriptions_and_servers_come_back(bus: Bus, nats_server: NatsServer) -> None:
    async def double(data: bytes) -> bytes:
        return data * 2

    seen: list[bytes] = []
    await bus.serve("score.x", double)
    await bus.subscribe("weights.*", lambda _, data: seen.append(data))
    async with await Bus.connect(nats_server.url, name="other") as other:
        nats_server.restart()
        await until(lambda: bus.reconnects == other.reconnects == 1, "both are back")
        assert await other.request("score.x", b"ab", deadline_s=30) == b"abab"
        await other.notify("weights.j", b"v1")
        await until(lambda: seen == [b"v1"], "the notification arrives")


@pytest.mark.long
async def test_a_silent_peer_is_noticed(nats_server: NatsServer) -> None:
    """A connection may end without any packet, as with a cut cable."""
    frozen = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: bool) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    if cut and frozen.is_set():
                        await asyncio.sleep(3600)
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.transport.abort()

    connections = 0
    async with asyncio.TaskGroup() as pumps:

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            up_reader, up_writer = await asyncio.open_connection(nats_server.host, nats_server.port)
            first = connections == 1
            tasks.append(pumps.create_task(pump(reader, up_writer, first)))
            tasks.append(pumps.create_task(pump(up_reader, writer, first)))

        tasks: list[asyncio.Task[None]] = []
        listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with listener, await Bus.connect(f"nats://127.0.0.1:{port}", name="cut off") as bus:
            await bus.ensure_streams(experience_bytes=8 << 20, stream_bytes=8 << 20)
            frozen.set()
            start = time.monotonic()
            await bus.publish(EXPERIENCE, os.urandom(900_000), deadline_s=60)
            assert time.monotonic() - start < 30
            assert bus.reconnects == 1
        for task in tasks:
            task.cancel()
    await asyncio.sleep(0)


async def test_a_handler_that_raises_is_logged_and_stops_nothing(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bytes] = []

    def handler(_: str, data: bytes) -> None:
        seen.append(data)
        raise RuntimeError("a bug in a handler")

    await bus.subscribe("weights.*", handler)
    for i in range(3):
        await bus.notify("weights.j", b"%d" % i)
    await bus.rtt()
    assert seen == [b"0", b"1", b"2"]
    assert "a bug in a handler" in caplog.text
    assert bus.reconnects == 0


async def test_a_dead_read_loop_is_replaced(bus: Bus) -> None:
    """An error callback that raises, for example, ends nats-py's read loop, and its status stays 'connected'."""
    bus._connection._client._reading_task.cancel()
    await asyncio.sleep(0)
    seq = await bus.publish(EXPERIENCE, b"x", deadline_s=30)
    assert (await bus.get(subjects.EXPERIENCE, seq)).data == b"x"
    assert bus.reconnects == 1


async def test_the_bus_reconnects_after_the_server_closed_with_an_error(bus: Bus) -> None:
    """After an error message from a server that then closes, nats-py never reconnects by itself."""
    with contextlib.suppress(Unavailable):
        await bus._connection._client._send_command(b"PUB too few\r\n")
        await bus._connection._client._flush_pending()
    await until(lambda: bus.reconnects == 1, "reconnected")
    assert await bus.publish(EXPERIENCE, b"x", deadline_s=30)


async def test_a_publish_can_be_cancelled(bus: Bus) -> None:
    payload = os.urandom(1 << 20)
    tasks = [asyncio.create_task(bus.publish(EXPERIENCE, payload)) for _ in range(40)]
    cancelled = []
    for i, task in enumerate(tasks):
        await asyncio.sleep(0.0002 * (i % 4 == 3))
        cancelled += [task] if task.cancel() else []
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in results] == [task in cancelled for task in tasks]
    assert cancelled
    assert await bus.rtt() < 2


async def test_nothing_hangs_after_close(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, name="closing")
    await bus.ensure_streams(experience_bytes=8 << 20, stream_bytes=8 << 20)
    feed = bus.follow(subjects.EXPERIENCE, EXPERIENCE)
    following = asyncio.ensure_future(anext(feed))
    waiting = asyncio.create_task(bus.request("score.nobody", b"", deadline_s=30))
    await asyncio.sleep(0.05)
    await bus.close()
    await bus.close()
    results = await asyncio.wait_for(asyncio.gather(following, waiting, return_exceptions=True), 2)
    assert all(isinstance(r, Unavailable) for r in results), results
    with pytest.raises(Unavailable):
        await bus.publish(EXPERIENCE, b"", deadline_s=5)


async def test_close_delivers_sent_messages(bus: Bus, nats_server: NatsServer) -> None:
    seen: list[bytes] = []
    await bus.subscribe("weights.*", lambda _, data: seen.append(data))
    async with await Bus.connect(nats_server.url, name="brief") as other:
        for _ in range(50):
            await other.notify("weights.j", bytes(50_000))
    await until(lambda: len(seen) == 50, "everything arrives")


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    start = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await Bus.connect("nats://user:secret@127.0.0.1:1", name="x", deadline_s=0.5)
    assert time.monotonic() - start < 20
    assert "nats://127.0.0.1:1" in str(caught.value)
    assert "PENSTOCK_NATS_URL" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_an_invalid_address_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="not a NATS address"):
        await Bus.connect("nats://host:port", name="x", deadline_s=2)


async def test_connecting_waits_for_a_late_server(nats_server: NatsServer) -> None:
    nats_server.kill()
    connecting = asyncio.create_task(Bus.connect(nats_server.url, name="early", deadline_s=5))
    await asyncio.sleep(0.4)
    nats_server.start()
    async with await connecting as bus:
        assert bus.connected


async def test_illegal_subjects_are_refused_by_the_client(bus: Bus) -> None:
    for subject in ("", "a b", "a\r\nPUB x 0"):
        with pytest.raises(ProtocolError):
            await bus.notify(subject, b"")
    with pytest.raises(ProtocolError):
        await bus.subscribe("a..b", lambda *_: None)
    assert bus.reconnects == 0
