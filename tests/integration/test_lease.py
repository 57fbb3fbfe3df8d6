"""Leases: takeover by observed silence, fencing, epochs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import msgspec
import pytest

from penstock.shared.errors import DeadlineError, Fenced
from penstock.shared.protocol import subjects
from penstock.shared.runtime.lease import Lease, LeaseRecord
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

LEASE_S, LONG_S = 0.5, 60.0


def lease(bus: Bus, holder: str, lease_s: float = LEASE_S) -> Lease:
    return Lease(bus, "trainer.job_1", holder=holder, lease_s=lease_s)


async def test_the_first_holder_gets_epoch_one(bus: Bus) -> None:
    a = lease(bus, "a")
    assert not a.held
    with pytest.raises(Fenced):
        a.check()
    assert await a.acquire() == 1
    a.check()
    await a.release()
    assert not a.held
    await a.release()


async def test_a_live_holder_keeps_its_lease(bus: Bus) -> None:
    a, b = lease(bus, "a"), lease(bus, "b")
    await a.acquire()
    keeping = asyncio.create_task(a.keep())
    with pytest.raises(DeadlineError, match="held by 'a'"):
        await b.acquire(deadline_s=3 * LEASE_S)
    assert a.held
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_the_lease_of_a_silent_holder_is_taken_over_and_the_holder_is_fenced(bus: Bus) -> None:
    a, b = lease(bus, "a"), lease(bus, "b")
    assert await a.acquire() == 1  # then a is stopped: it renews nothing
    start = time.monotonic()
    assert await b.acquire(deadline_s=30) == 2
    assert time.monotonic() - start >= LEASE_S
    assert not a.held, "by its own clock, its lease ended before anybody could take over"
    with pytest.raises(Fenced):
        await a.keep()
    assert b.held


@pytest.mark.long
async def test_two_holders_are_never_valid_together(bus: Bus) -> None:
    """The holders stall longer than the lease: while one of them believes that it holds the lease, no other does."""
    leases = [lease(bus, name) for name in "abc"]
    epochs: list[int] = []
    until = time.monotonic() + 2.5

    async def live(mine: Lease, stall_s: float) -> None:
        while time.monotonic() < until:
            try:
                epochs.append(await mine.acquire(deadline_s=1.0))
            except DeadlineError:
                continue
            assert sum(other.held for other in leases) == 1
            await asyncio.sleep(0.1)
            await mine.renew()
            assert sum(other.held for other in leases) == 1
            await asyncio.sleep(stall_s)  # longer than the lease: the others may take it

    await asyncio.gather(*(live(mine, LEASE_S * k) for mine, k in zip(leases, (1.1, 1.4, 1.8), strict=True)))
    assert len(epochs) >= 3
    assert epochs == sorted(set(epochs)), "epochs only grow"


async def test_a_released_lease_is_taken_at_once(bus: Bus) -> None:
    a, b = lease(bus, "a", LONG_S), lease(bus, "b", LONG_S)
    await a.acquire()
    waiting = asyncio.create_task(b.acquire(deadline_s=2 * LONG_S))
    await asyncio.sleep(0.15)
    await a.release()
    start = time.monotonic()
    assert await waiting == 2
    assert time.monotonic() - start < LONG_S / 2


async def test_a_restarted_process_reclaims_its_own_lease_at_once(bus: Bus) -> None:
    before, after = lease(bus, "trainer-0", LONG_S), lease(bus, "trainer-0", LONG_S)
    await before.acquire()
    start = time.monotonic()
    assert await after.acquire() == 2
    assert time.monotonic() - start < LONG_S / 2
    with pytest.raises(Fenced, match="epoch 2 > 1"):
        await before.renew()
    assert not before.held


@pytest.mark.long
async def test_of_many_candidates_one_wins(bus: Bus) -> None:
    candidates = [lease(bus, f"c{i}") for i in range(6)]
    await lease(bus, "gone").acquire()
    epochs: list[int] = []

    async def run(mine: Lease) -> None:
        epochs.append(await mine.acquire())
        await mine.keep()

    running = [asyncio.create_task(run(candidate)) for candidate in candidates]
    await asyncio.sleep(3 * LEASE_S)
    assert (epochs, sum(c.held for c in candidates)) == ([2], 1)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.long
async def test_a_short_outage_does_not_cost_the_lease(bus: Bus, nats_server: NatsServer) -> None:
    a = Lease(bus, "coordinator", holder="a", lease_s=1.2)
    await a.acquire()
    keeping = asyncio.create_task(a.keep())
    nats_server.restart()
    await asyncio.sleep(1.5)
    assert a.held
    assert not keeping.done()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.long
async def test_a_long_outage_ends_the_lease_and_counts_as_no_silence(bus: Bus, nats_server: NatsServer) -> None:
    a, b = lease(bus, "a"), lease(bus, "b")
    await a.acquire()
    keeping = asyncio.create_task(a.keep())
    waiting = asyncio.create_task(b.acquire(deadline_s=5))
    await asyncio.sleep(0.1)
    nats_server.kill()
    with pytest.raises(Fenced):
        await asyncio.wait_for(keeping, 30)
    await asyncio.sleep(LEASE_S)
    nats_server.start()
    await bus.wait_connected(3)
    start = time.monotonic()
    assert await waiting == 2
    assert time.monotonic() - start > LEASE_S * 0.8, "the outage was taken for silence"


async def test_a_stored_lease_is_readable_json(bus: Bus) -> None:
    await lease(bus, "a").acquire()
    entry = await bus.kv(subjects.LEASES).get("trainer.job_1")
    assert entry is not None
    assert entry.value == b'{"holder":"a","epoch":1,"lease_s":0.5}'


@pytest.mark.long
async def test_a_loop_that_is_held_up_keeps_its_lease(bus: Bus) -> None:
    """The event loop is blocked for several lease lengths; a thread renews the lease meanwhile."""
    a = lease(bus, "a")
    await a.acquire()
    keeping = asyncio.create_task(a.keep())
    await until_renewed(bus)
    hold_up(4 * LEASE_S)
    a.check()
    assert await asyncio.to_thread(lambda: a.held), "any thread may ask"
    await asyncio.sleep(0)
    assert not keeping.done()
    assert await epoch_of(bus) == 1
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await a.release()
    assert await lease(bus, "b").acquire(deadline_s=LEASE_S) == 2, "a released lease is taken at once"
    async with asyncio.timeout(20):
        while any(thread.name.startswith("lease ") for thread in threading.enumerate()):
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_a_loop_that_hangs_loses_its_lease(bus: Bus) -> None:
    a = Lease(bus, "trainer.job_1", holder="a", lease_s=LEASE_S, hung_s=1.0)
    await a.acquire()
    keeping = asyncio.create_task(a.keep())
    await until_renewed(bus)
    hold_up(1.0 + 3 * LEASE_S)
    assert not a.held
    with pytest.raises(Fenced, match=r"not held|gave no sign"):
        await keeping
    assert await lease(bus, "b").acquire(deadline_s=10) == 2


HOLDER = """
import asyncio, sys
from penstock.shared.errors import Fenced
from penstock.shared.runtime.lease import Lease
from penstock.shared.transport.bus import Bus

async def main():
    async with await Bus.connect(sys.argv[1], name="a") as bus:
        lease = Lease(bus, "trainer.job_1", holder="a", lease_s=float(sys.argv[2]))
        print(await lease.acquire(), flush=True)
        try:
            await lease.keep()
        except Fenced:
            print("fenced", lease.held, flush=True)

asyncio.run(main())
"""


async def test_a_process_that_is_stopped_loses_its_lease(bus: Bus, nats_server: NatsServer) -> None:
    a = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, nats_server.url, str(LEASE_S), stdout=asyncio.subprocess.PIPE
    )
    assert a.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await a.stdout.readline() == b"1\n"
            await until_renewed(bus)
            os.kill(a.pid, signal.SIGSTOP)
            b = lease(bus, "b")
            assert await b.acquire() == 2
            os.kill(a.pid, signal.SIGCONT)
            assert await a.stdout.readline() == b"fenced False\n"
            b.check()
    finally:
        a.kill()
        await a.wait()


def hold_up(seconds: float) -> None:
    """Block the event loop for ``seconds``."""
    time.sleep(seconds)


async def until_renewed(bus: Bus) -> None:
    """Return once the lease has been renewed after its acquisition."""
    first = await bus.kv(subjects.LEASES).get("trainer.job_1")
    assert first is not None
    async with asyncio.timeout(30):
        while (entry := await bus.kv(subjects.LEASES).get("trainer.job_1")) is None or entry.revision == first.revision:
            await asyncio.sleep(0.02)


async def epoch_of(bus: Bus) -> int:
    entry = await bus.kv(subjects.LEASES).get("trainer.job_1")
    assert entry is not None
    assert entry.value is not None
    return msgspec.json.decode(entry.value, type=LeaseRecord).epoch


async def test_a_holder_that_is_cancelled_at_once_ends(bus: Bus) -> None:
    for _ in range(20):  # before its thread renews, which begins at any moment
        a = lease(bus, "a")
        await a.acquire()
        keeping = asyncio.create_task(a.keep())
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.wait({keeping}, timeout=10)
        assert keeping.done(), "the holder waits for a thread that renews nothing"
        await a.release()


@pytest.mark.long
async def test_a_lease_outlives_a_slow_start_of_its_thread(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = bus.another

    async def connect_slowly(*, name: str, deadline_s: float = 10.0) -> Bus:  # as on an overloaded host
        await asyncio.sleep(3 * LEASE_S)
        return await connect(name=name, deadline_s=deadline_s)

    monkeypatch.setattr(bus, "another", connect_slowly)
    a = lease(bus, "a")
    await a.acquire()
    keeping = asyncio.create_task(a.keep())
    await asyncio.wait({keeping}, timeout=6 * LEASE_S)
    assert not keeping.done() and a.held
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
