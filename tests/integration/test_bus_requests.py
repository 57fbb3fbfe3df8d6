"""Requests with replies, and notifications."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from penstock.shared.errors import Conflict, PenstockError, ProtocolError, Unavailable
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer


async def test_a_request_is_answered(bus: Bus) -> None:
    async def double(data: bytes) -> bytes:
        return data * 2

    async with await bus.serve("score.j", double):
        assert await bus.request("score.j", b"ab", deadline_s=30) == b"abab"
        assert len(await bus.request("score.j", bytes(3 << 20), deadline_s=30)) == 6 << 20
    with pytest.raises(Unavailable, match=r"nobody serves 'score\.j'"):
        await bus.request("score.j", b"", deadline_s=1)


async def test_errors_cross_the_wire_by_name(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(data: bytes) -> bytes:
        if data == b"conflict":
            raise Conflict("the job is cancelled")
        if data == b"large":
            return bytes(9 << 20)
        raise ValueError("a bug")

    await bus.serve("command.j", fail)
    with pytest.raises(Conflict, match="the job is cancelled"):
        await bus.request("command.j", b"conflict", deadline_s=30)
    with pytest.raises(ProtocolError, match="too large"):
        await bus.request("command.j", b"large", deadline_s=30)
    with caplog.at_level(logging.CRITICAL), pytest.raises(PenstockError, match="a bug"):
        await bus.request("command.j", b"bug", deadline_s=30)


@pytest.mark.long
async def test_a_request_without_a_timely_answer_fails_and_names_its_subject(bus: Bus) -> None:
    async def slow(_: bytes) -> bytes:
        await asyncio.sleep(3)
        return b""

    await bus.serve("score.j", slow)
    start = time.monotonic()
    with pytest.raises(Unavailable, match=r"'score\.j' within 0\.1 s"):
        await bus.request("score.j", b"", deadline_s=0.1)
    assert time.monotonic() - start < 2.5


async def test_requests_run_concurrently_up_to_the_limit(bus: Bus) -> None:
    running = most = 0

    async def handler(_: bytes) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return b"ok"

    await bus.serve("score.j", handler, max_concurrent=3)
    replies = await asyncio.gather(*(bus.request("score.j", b"", deadline_s=30) for _ in range(12)))
    assert replies == [b"ok"] * 12
    assert most == 3


async def test_a_queue_shares_requests(bus: Bus, nats_server: NatsServer) -> None:
    counts = {"a": 0, "b": 0}

    async def serve(where: Bus, name: str) -> None:
        async def handler(_: bytes) -> bytes:
            counts[name] += 1
            return b""

        await where.serve("score.*", handler, queue="reward")

    async with await Bus.connect(nats_server.url, name="other") as other:
        await serve(bus, "a")
        await serve(other, "b")
        await asyncio.gather(*(bus.request("score.j", b"", deadline_s=30) for _ in range(60)))
    assert sum(counts.values()) == 60
    assert min(counts.values()) > 5


async def test_closing_lets_running_requests_finish(bus: Bus, nats_server: NatsServer) -> None:
    started = asyncio.Event()

    async def handler(_: bytes) -> bytes:
        started.set()
        await asyncio.sleep(0.2)
        return b"done"

    other = await Bus.connect(nats_server.url, name="server")
    await other.serve("score.j", handler)
    asking = asyncio.create_task(bus.request("score.j", b"", deadline_s=30))
    await started.wait()
    await other.close()
    assert await asking == b"done"


async def test_notifications_reach_current_subscribers(bus: Bus) -> None:
    seen: list[tuple[str, bytes]] = []
    async with await bus.subscribe("heartbeat.>", lambda subject, data: seen.append((subject, data))):
        await bus.notify("heartbeat.rollout.w1", b"1")
        await bus.rtt()
    await bus.notify("heartbeat.rollout.w1", b"2")
    await bus.rtt()
    assert seen == [("heartbeat.rollout.w1", b"1")]


async def test_messages_sent_before_close_arrive(bus: Bus, nats_server: NatsServer) -> None:
    """The messages exceed the socket's buffer, so that some are still in this process when ``close`` begins."""
    seen: list[int] = []
    subject = "test.flushed"
    await bus.subscribe(subject, lambda _subject, data: seen.append(data[0]))
    await bus.rtt()
    async with await Bus.connect(nats_server.url, name="sender") as sender:
        for number in range(100):
            await sender.notify(subject, bytes([number]) * (256 << 10))
    async with asyncio.timeout(30):
        while len(seen) < 100:
            await asyncio.sleep(0.01)
    assert seen == list(range(100))
