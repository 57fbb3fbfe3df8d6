"""Statuses that a replaced leader publishes after its successor change nothing that the API shows."""

from __future__ import annotations

from typing import Any

from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.interaction import FeedbackStatus, InteractionStatus, StatusBatch


async def test_statuses_of_a_replaced_leader_are_ignored(open_live: Any) -> None:
    """A coordinator that was restarted in between ignores them, too."""

    async def publish(live: Any, epoch: int, status: Any) -> None:
        batch = StatusBatch(
            items=[FeedbackStatus(feedback=item, status=status, time=float(epoch))],
            interactions=[InteractionStatus(interaction=answer, status=status, ordinal=0, time=float(epoch))],
        )
        await live.bus.publish(subjects.decisions(live.job), pack(batch, job=live.job, epoch=epoch))

    async def shown(live: Any) -> tuple[str, str]:
        await live.service.index.catch_up(subjects.DECISIONS)
        return (await live.status_of(item))["status"], (await live.service.decisions([answer]))[answer]["status"]

    async with open_live() as first:
        item, answer = (await first.accept())["feedback_id"], first.new_id()
        await publish(first, 4, "admitted")
        await publish(first, 5, "trained")
        await publish(first, 4, "rejected")
        assert await shown(first) == ("trained", "trained")
    async with open_live() as second:
        await publish(second, 4, "rejected")
        assert await shown(second) == ("trained", "trained")
        await publish(second, 6, "admitted")
        assert await shown(second) == ("admitted", "admitted")
