"""Two coordinators on one bus: each knows at once which feedback the other accepted, and counts it once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.feedback import service as service_module
from penstock.services.coordinator.feedback.erasure import Eraser, Report
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Admission, Admitted, encode_events
from penstock.shared.protocol.live.interaction import FeedbackStatus


def admitted(interaction: str) -> Admitted:
    """Return the ledger event that admits an answer to training."""
    admission = Admission(0, {interaction: 1}, {}, 1.0, 0, "k", "somebody", "default", 1.0)
    return Admitted(writer_epoch=1, time=1.0, admissions=[admission], low_interactions=1, low_feedback=1)


async def test_a_replica_finds_feedback_that_the_other_one_accepted(open_live: Any, tmp_path: Path) -> None:
    async with open_live() as first, open_live(tmp_path / "other") as second:
        fronts = [first, second]

        async def post(number: int) -> str:
            accepting, other = fronts[number % 2], fronts[1 - number % 2]
            id = (await accepting.accept())["feedback_id"]
            row = await other.status_of(id)  # 404 if it had to be waited for
            assert (row["feedback_id"], row["status"]) == (id, "received")
            return str(id)

        ids = await asyncio.gather(*(post(number) for number in range(40)))
        assert sorted(item.id for item in await first.items()) == sorted(ids), "each of them once"
        await first.decide(*(FeedbackStatus(feedback=id, status="rejected", reason="stale", time=1.0) for id in ids))
        for front in fronts:

            async def counted(front: Any = front) -> bool:
                funnel = (await front.client.get(f"/v1/jobs/{front.job}/feedback")).json()
                return bool(funnel["by_status"] == {"rejected": 40})

            await front.until(counted, "statuses")
        assert (await second.client.get(f"/v1/feedback/{second.new_id()}")).status_code == 404


async def test_a_request_that_is_repeated_elsewhere_has_one_effect(open_live: Any, tmp_path: Path) -> None:
    async with open_live() as first, open_live(tmp_path / "other") as second:
        body = {"inference_id": first.new_id(), "metric_name": "accepted", "value": True}
        one = await first.post(body, Idempotency_Key="k")
        await second.status_of(one.json()["feedback_id"])
        again = await second.post(body, Idempotency_Key="k")
        assert again.json()["feedback_id"] == one.json()["feedback_id"]
        assert again.json()["duplicate"]
        assert len(await first.items()) == 1
        other = await second.post({**body, "value": False}, Idempotency_Key="k")
        assert other.status_code == 422
        taken_back = await second.client.post(f"/v1/feedback/{one.json()['feedback_id']}/retract")
        assert taken_back.status_code == 202


async def test_a_deletion_that_another_replica_left_is_finished(
    open_live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "ABANDONED_S", 0.2)
    async with open_live() as first, open_live(tmp_path / "other") as second:
        await first.record("somebody", text="said once")
        await first.service._eraser.begin(first.service.pseudonyms.of("somebody"))  # and then it died

        async def done() -> bool:
            return (await second.client.get("/v1/users/somebody/data")).json()["status"] == "done"

        await second.until(done, "deletion")
        assert not await second.bus.read("INTERACTIONS", "interactions.>")


@pytest.mark.long
async def test_a_deletion_that_takes_long_is_carried_out_by_one_replica(
    open_live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion waits for a job longer than a process may be silent; a second request begins no second deletion."""
    monkeypatch.setattr(service_module, "ABANDONED_S", 4.0)
    monkeypatch.setattr(service_module, "PROMPT_S", 0.1)
    let_go, begun = asyncio.Event(), list[str]()

    async def slowly(self: Eraser, report: Report, job: str, made: Any) -> None:
        begun.append(self._holder)
        await let_go.wait()

    async def is_counted(live: Any) -> bool:
        return bool(begun) and (await live.client.get("/v1/users/somebody/data")).json()["interactions"] == 1

    monkeypatch.setattr(Eraser, "_erase_groups", slowly)
    async with open_live() as first, open_live(tmp_path / "other") as second:
        record = await first.record("somebody", text="said once")
        await first.bus.publish(subjects.ledger(first.job), encode_events([admitted(record.id)]))
        assert (await first.client.delete("/v1/users/somebody/data")).json()["status"] == "running"
        await first.until(lambda: is_counted(first), "deletion that has counted what there is")
        clock = asyncio.get_running_loop().time
        end = clock() + 1.5 * service_module.ABANDONED_S
        while clock() < end:
            await asyncio.sleep(0.5)
            again = (await second.client.delete("/v1/users/somebody/data")).json()
            assert (again["status"], again["interactions"]) == ("running", 1), "counts go on"
        assert len(begun) == 1
        late = await first.record("somebody", text="said meanwhile")
        let_go.set()

        async def done() -> bool:
            return (await second.client.get("/v1/users/somebody/data")).json()["status"] == "done"

        await second.until(done, "deletion")
        assert not await second.bus.read("INTERACTIONS", "interactions.>"), f"{late.id} was asked for, too"
        await second.client.delete("/v1/users/somebody/data")
        await second.until(done, "second deletion")
        report = (await second.client.get("/v1/users/somebody/data")).json()
        assert (report["status"], report["interactions"]) == ("done", 2), "of all that was ever deleted"
        assert not {"holder", "alive"} & report.keys()
