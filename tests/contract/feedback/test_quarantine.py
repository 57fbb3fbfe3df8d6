"""Feedback that is held back, over HTTP: listed and shown from any replica, decided by an item in the stream."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.protocol.interaction import Fate


async def held(desk: Any, **body: Any) -> str:
    """An item that the leader holds back."""
    id = (await desk.accept(**body))["feedback_id"]
    await desk.decide(Fate(feedback=id, status="quarantined", reason="outlier: 1 is far", time=2.0))
    return str(id)


async def test_what_is_held_is_listed_and_shown(desk: Any) -> None:
    target = desk.new_id()
    first = await held(desk, inference_id=target, metric_name="score", value=0.75, weight=0.5)
    second = await held(desk)
    await desk.accept()
    path = f"/v1/jobs/{desk.job}/quarantine"
    page = (await desk.client.get(path)).json()
    assert {row["feedback_id"] for row in page["data"]} == {first, second}
    one = (await desk.client.get(f"{path}?limit=1")).json()
    rest = (await desk.client.get(f"{path}?after={one['last_id']}")).json()
    assert (one["has_more"], len(rest["data"]), rest["has_more"]) == (True, 1, False)
    shown = (await desk.client.get(f"{path}/fb_{first}")).json()
    assert (shown["metric"], shown["value"], shown["target"], shown["weight"]) == ("score", 0.75, target, 0.5)
    assert shown["reason"] == "outlier: 1 is far"
    assert (await desk.fate(first))["status"] == "quarantined"


@pytest.mark.parametrize("verdict", ["release", "drop"])
async def test_a_verdict_is_an_item_of_the_stream_once(desk: Any, verdict: str) -> None:
    id = await held(desk)
    path = f"/v1/jobs/{desk.job}/quarantine/{id}/{verdict}"
    reply = await desk.client.post(path)
    assert (reply.status_code, reply.json()["duplicate"]) == (202, False), reply.text
    assert (await desk.client.post(path)).json()["duplicate"] is True
    items = [item for item in await desk.items() if item.kind == verdict]
    assert [item.body for item in items] == [{"feedback": id}]
    await desk.decide(Fate(feedback=id, status="matched", time=3.0))
    gone = await desk.client.post(path)
    assert (gone.status_code, "it is matched" in gone.text) == (409, True)
    counted = (await desk.client.get(f"/v1/jobs/{desk.job}/feedback")).json()
    assert counted["items"] == 1, "a verdict is no feedback"


async def test_only_what_is_held_in_this_job_is_found(desk: Any) -> None:
    path = f"/v1/jobs/{desk.job}/quarantine"
    unheld = (await desk.accept())["feedback_id"]
    assert (await desk.client.get(f"{path}/{unheld}")).status_code == 409
    assert (await desk.client.get(f"{path}/{desk.new_id()}")).status_code == 404
    assert (await desk.client.get(f"{path}/nonsense")).status_code == 404
    other = f"/v1/jobs/job_{'0' * 32}/quarantine"
    assert (await desk.client.get(other)).status_code == 404
