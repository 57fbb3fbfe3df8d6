"""The queue of updates that a leader applies between its decisions."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.shared.runtime.tasks import Inbox


async def test_one_turn_takes_what_waits_and_the_next_what_arrives_meanwhile() -> None:
    inbox, taken = Inbox(), list[int]()

    async def update(number: int) -> None:
        taken.append(number)
        if number == 1:
            await inbox.put(lambda: update(9))

    for number in range(3):
        await inbox.put(lambda number=number: update(number))  # type: ignore[misc]
    await inbox.take(1.0)
    assert taken == [0, 1, 2]
    await inbox.take(1.0)
    assert taken == [0, 1, 2, 9]


async def test_a_flood_of_updates_does_not_delay_decisions() -> None:
    inbox, taken = Inbox(), list[int]()

    async def slow(number: int) -> None:
        taken.append(number)
        await asyncio.sleep(0.02)

    for number in range(100):
        await inbox.put(lambda number=number: slow(number))  # type: ignore[misc]
    await inbox.take(0.1)
    assert 1 <= len(taken) <= 10
    await inbox.take(0.01)
    assert taken == list(range(len(taken))), "in order"
    assert len(taken) >= 2


async def test_a_requester_gets_the_decision() -> None:
    inbox = Inbox()

    async def decide() -> str:
        return "decided"

    asking = asyncio.create_task(inbox.ask(decide))
    await inbox.take(1.0)
    assert await asking == "decided"


async def test_waking_a_full_inbox_neither_fails_nor_fills_it_further() -> None:
    inbox = Inbox(1)
    for _ in range(3):
        inbox.wake()
    before = time.monotonic()
    await inbox.take(30.0)
    assert time.monotonic() - before < 5
    with pytest.raises(TimeoutError):  # the inbox is empty again, and a turn without updates ends by itself
        await asyncio.wait_for(inbox.take(30.0), 0.05)
    await inbox.take(0.01)
