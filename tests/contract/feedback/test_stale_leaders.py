"""A leader that speaks after its successor changes nothing that people see."""

from __future__ import annotations

from typing import Any

from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.interaction import FeedbackStatus, InteractionStatus, StatusBatch


async def test_fates_of_a_leader_that_is_gone_are_passed_over(open_desk: Any) -> None:
    """Also by a coordinator that was started again in between."""

    async def tell(desk: Any, epoch: int, status: Any) -> None:
        batch = StatusBatch(
            items=[FeedbackStatus(feedback=item, status=status, time=float(epoch))],
            interactions=[InteractionStatus(interaction=answer, status=status, ordinal=0, time=float(epoch))],
        )
        await desk.bus.publish(subjects.decisions(desk.job), pack(batch, job=desk.job, epoch=epoch))

    async def told(desk: Any) -> tuple[str, str]:
        await desk.desk.index.catch_up(subjects.DECISIONS)
        return (await desk.status_of(item))["status"], (await desk.desk.decisions([answer]))[answer]["status"]

    async with open_desk() as first:
        item, answer = (await first.accept())["feedback_id"], first.new_id()
        await tell(first, 4, "admitted")
        await tell(first, 5, "trained")
        await tell(first, 4, "rejected")
        assert await told(first) == ("trained", "trained")
    async with open_desk() as second:
        await tell(second, 4, "rejected")
        assert await told(second) == ("trained", "trained")
        await tell(second, 6, "admitted")
        assert await told(second) == ("admitted", "admitted")
