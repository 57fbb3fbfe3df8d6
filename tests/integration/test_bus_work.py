"""Work queues: leases, redelivery, dead letters."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.shared.errors import NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, Delivery, Puller

JOB = "job_1"
TICKETS = subjects.tickets(JOB)


async def workers(bus: Bus, *, ack_wait_s: float = 5.0, max_deliver: int = -1, max_ack_pending: int = 100) -> Puller:
    return await bus.pull(
        subjects.TICKETS, TICKETS, "workers",
        ack_wait_s=ack_wait_s, max_deliver=max_deliver, max_ack_pending=max_ack_pending,
    )  # fmt: skip


async def put(bus: Bus, n: int) -> None:
    for i in range(n):
        await bus.publish(TICKETS, b"%d" % i)


async def one(puller: Puller, wait_s: float = 2.0) -> Delivery:
    found = await puller.fetch(1, wait_s)
    assert len(found) == 1, f"nothing came within {wait_s} s"
    return found[0]


async def drained(bus: Bus) -> None:
    for _ in range(100):
        if (await bus.stream_state(subjects.TICKETS)).messages == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the queue still holds messages after 2 s")


async def test_fetch_returns_available_messages_and_leases_no_more(bus: Bus) -> None:
    async with await workers(bus) as puller:
        await put(bus, 3)
        start = time.monotonic()
        found = await puller.fetch(10, 40.0)
        assert [d.data for d in found] == [b"0", b"1", b"2"]
        assert time.monotonic() - start < 20, "the fetch waited although messages were available"
        assert [d.deliveries for d in found] == [1, 1, 1]
        await put(bus, 2)
        assert len(await puller.fetch(1, 1.0)) == 1
        state = await bus.consumer_state(subjects.TICKETS, "workers")
        assert (state.ack_pending, state.delivered_seq) == (4, 4), "more messages were leased than requested"


async def test_small_fetches_do_not_pause(bus: Bus) -> None:
    async with await workers(bus) as puller:
        await put(bus, 60)
        start = time.monotonic()
        for _ in range(30):
            assert len(await puller.fetch(2, 1.0)) == 2
        assert time.monotonic() - start < 20


async def test_fetch_waits_for_the_first_message(bus: Bus) -> None:
    async with await workers(bus) as puller:
        start = time.monotonic()
        assert await puller.fetch(4, 0.3) == []
        assert 0.25 < time.monotonic() - start < 20
        waiting = asyncio.create_task(puller.fetch(4, 40.0))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await put(bus, 1)
        assert len(await waiting) == 1
        assert time.monotonic() - start < 20


async def test_an_acknowledged_message_leaves_the_queue(bus: Bus) -> None:
    async with await workers(bus) as puller:
        await put(bus, 5)
        for delivery in await puller.fetch(5, 1.0):
            await delivery.ack()
        await drained(bus)
        assert await puller.fetch(1, 0.2) == []


async def test_a_silent_worker_loses_its_lease(bus: Bus) -> None:
    async with await workers(bus, ack_wait_s=0.5) as first, await workers(bus, ack_wait_s=0.5) as second:
        await put(bus, 1)
        lost = await one(first)
        again = await one(second)
        assert (again.seq, again.deliveries) == (lost.seq, 2)
        await again.ack()
        await drained(bus)


async def test_progress_extends_a_lease(bus: Bus) -> None:
    async with await workers(bus, ack_wait_s=0.4) as puller:
        await put(bus, 1)
        delivery = await one(puller)
        for _ in range(6):
            assert await puller.fetch(1, 0.15) == []
            await delivery.in_progress()
        await delivery.ack()
        await drained(bus)


async def test_refused_work_comes_back_after_its_delay(bus: Bus) -> None:
    async with await workers(bus) as puller:
        await put(bus, 1)
        start = time.monotonic()
        await (await one(puller)).nak(0.4)
        again = await one(puller)
        assert again.deliveries == 2
        assert 0.35 < time.monotonic() - start < 20
        await again.term()
        await drained(bus)


async def test_a_message_past_its_deliveries_is_reported_and_stays(bus: Bus) -> None:
    dead: asyncio.Queue[tuple[str, str, int]] = asyncio.Queue()
    async with (
        await bus.dead_letters(lambda *what: dead.put_nowait(what)),
        await workers(bus, ack_wait_s=0.2, max_deliver=2) as puller,
    ):
        await put(bus, 1)
        seq = [await one(puller), await one(puller)][-1].seq
        assert await puller.fetch(1, 0.4) == []
        assert await asyncio.wait_for(dead.get(), 2) == (subjects.TICKETS, "workers", seq)
        assert (await bus.get(subjects.TICKETS, seq)).data == b"0"


@pytest.mark.long
async def test_no_more_is_leased_than_allowed(bus: Bus) -> None:
    async with await workers(bus, max_ack_pending=3) as one_worker, await workers(bus, max_ack_pending=3) as other:
        await put(bus, 5)
        held = await one_worker.fetch(10, 0.5)
        assert len(held) == 3
        assert await other.fetch(10, 0.3) == [], "the cap is for all workers together"
        await held[0].ack()
        assert len(await other.fetch(10, 1.0)) == 1


async def test_workers_share_without_doubling(bus: Bus) -> None:
    await put(bus, 60)
    seen: list[bytes] = []

    async def work() -> None:
        async with await workers(bus) as puller:
            while found := await puller.fetch(4, 0.3):
                for delivery in found:
                    seen.append(delivery.data)
                    await delivery.ack()

    await asyncio.gather(*(work() for _ in range(4)))
    assert sorted(seen, key=int) == [b"%d" % i for i in range(60)]


async def test_messages_for_a_cancelled_fetch_are_redelivered_after_close(bus: Bus) -> None:
    puller = await workers(bus, ack_wait_s=30)
    asking = asyncio.create_task(puller.fetch(4, 5.0))
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await put(bus, 1)  # arrives for a fetch that was cancelled
    await asyncio.sleep(0.1)
    await puller.close()
    async with await workers(bus, ack_wait_s=30) as other:
        assert (await one(other)).data == b"0"


async def test_a_deleted_consumer_is_created_again(bus: Bus) -> None:
    async with await workers(bus) as puller:
        await put(bus, 1)
        await bus.delete_consumer(subjects.TICKETS, "workers")
        await bus.delete_consumer(subjects.TICKETS, "workers")
        assert (await one(puller, 3.0)).data == b"0"


async def test_a_work_queue_has_one_consumer_per_subject(bus: Bus) -> None:
    async with await workers(bus):
        with pytest.raises(Unavailable, match="10100"):
            await bus.pull(subjects.TICKETS, TICKETS, "rivals", ack_wait_s=1)
    with pytest.raises(NotFound):
        await bus.pull("NOPE", "nope", "x", ack_wait_s=1)
