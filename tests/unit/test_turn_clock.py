"""The clock of a turn, which a conversation can stop."""

from __future__ import annotations

import asyncio

import pytest

from penstock.services.rollout.conversations.turn_clock import TurnClock


async def test_stopped_time_does_not_count() -> None:
    async with TurnClock(0.3) as clock:

        async def wait(seconds: float) -> None:
            with clock.stopped():
                await asyncio.sleep(seconds)

        with clock.stopped():
            await asyncio.gather(wait(0.2), wait(0.5))
            await asyncio.sleep(0.1)


async def test_the_remaining_time_counts_after_a_stop() -> None:
    with pytest.raises(TimeoutError):
        async with TurnClock(0.2) as clock:
            with clock.stopped():
                await asyncio.sleep(0)
            await asyncio.sleep(60)


async def test_stopping_an_expired_clock_changes_nothing() -> None:
    with pytest.raises(TimeoutError):
        async with TurnClock(0.05) as clock:
            try:
                await asyncio.sleep(60)
            finally:
                with clock.stopped():
                    pass
