"""The time of a turn."""

from __future__ import annotations

import asyncio

import pytest

from penstock.services.rollout.conversations.turn_clock import TurnClock


async def test_time_in_which_it_is_stopped_does_not_count() -> None:
    async with TurnClock(0.3) as clock:

        async def wait(seconds: float) -> None:
            with clock.stopped():
                await asyncio.sleep(seconds)

        with clock.stopped():
            await asyncio.gather(wait(0.2), wait(0.5))
            await asyncio.sleep(0.1)


async def test_the_rest_counts_from_where_it_was_stopped() -> None:
    with pytest.raises(TimeoutError):
        async with TurnClock(0.2) as clock:
            with clock.stopped():
                await asyncio.sleep(0)
            await asyncio.sleep(60)


async def test_stopping_it_when_it_is_over_changes_nothing() -> None:
    with pytest.raises(TimeoutError):
        async with TurnClock(0.05) as clock:
            try:
                await asyncio.sleep(60)
            finally:
                with clock.stopped():
                    pass
