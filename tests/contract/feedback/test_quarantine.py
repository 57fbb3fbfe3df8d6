"""Feedback that is held back, over HTTP: listed and shown from any replica, decided by an item in the stream."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.protocol.live.interaction import FeedbackStatus, new_marked_id


async def held(desk: Any, **body: Any) -> str:
    """An item that the leader holds back."""
    id = (await desk.accept(**body))["feedback_id"]
    await desk.decide(FeedbackStatus(feedback=id, status="quarantined", reason="outlier: 1 is far", time=2.0))
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
    assert (await desk.client.get(f"/v1/quarantine/{first}")).json() == shown
    assert (shown["metric"], shown["value"], shown["target"], shown["weight"]) == ("score", 0.75, target, 0.5)
    assert shown["reason"] == "outlier: 1 is far"
    assert (await desk.status_of(first))["status"] == "quarantined"


async def test_what_is_held_in_all_jobs_is_one_list(desk: Any) -> None:
    other = await desk.store.create(parse_job({**(await desk.store.get(desk.job)).spec, "name": "other"}))
    desk.desk.jobs.know((await desk.store.index()).get(other.id))
    here = sorted([await held(desk), await held(desk)])
    there = await held(desk, inference_id=new_marked_id(other.id))
    await desk.accept()
    rows = (await desk.client.get("/v1/quarantine")).json()["data"]
    assert [(row["feedback_id"], row["job"]) for row in rows] == sorted(
        [(here[0], desk.job), (here[1], desk.job), (there, other.id)]
    )
    paged, after = [], ""
    for more in (True, True, False):
        page = (await desk.client.get(f"/v1/quarantine?limit=1&after={after}")).json()
        assert (page["has_more"], page["first_id"]) == (more, page["last_id"])
        paged, after = paged + page["data"], page["last_id"]
    assert paged == rows
    for job, ids in ((desk.job, here), (other.id, [there])):
        page = (await desk.client.get(f"/v1/quarantine?job={job}")).json()
        assert [row["feedback_id"] for row in page["data"]] == ids
        assert page == (await desk.client.get(f"/v1/jobs/{job}/quarantine")).json()
    assert (await desk.client.get(f"/v1/quarantine?job=job_{'0' * 32}")).status_code == 404
    assert (await desk.client.get("/v1/quarantine?job=%C2%99")).status_code == 404
    assert (await desk.client.get("/v1/quarantine?limit=0")).status_code == 422


async def test_the_list_of_all_jobs_needs_its_scope(open_desk: Any) -> None:
    root = {"authorization": "Bearer root"}
    async with open_desk(api_keys="root") as desk:
        for scope, status in (("feedback:write", 403), ("jobs:read", 403), ("feedback:admin", 200)):
            made = await desk.client.post("/v1/keys", json={"name": "k", "scopes": [scope]}, headers=root)
            key = {"authorization": f"Bearer {made.json()['key']}"}
            assert (await desk.client.get("/v1/quarantine", headers=key)).status_code == status, scope
        assert (await desk.client.get("/v1/quarantine")).status_code == 401


async def test_a_key_for_some_models_sees_what_is_held_in_these(open_desk: Any) -> None:
    root = {"authorization": "Bearer root"}
    async with open_desk(api_keys="root") as desk:
        desk.client.headers.update(root)
        other = await desk.store.create(parse_job({**(await desk.store.get(desk.job)).spec, "name": "other"}))
        desk.desk.jobs.know((await desk.store.index()).get(other.id))
        here, there = await held(desk), await held(desk, inference_id=new_marked_id(other.id))
        for model, job, seen, hidden in (("policy", desk.job, here, there), (other.id, other.id, there, here)):
            body = {"name": "k", "scopes": ["feedback:admin"], "models": [model]}
            made = await desk.client.post("/v1/keys", json=body)
            key = {"authorization": f"Bearer {made.json()['key']}"}
            rows = (await desk.client.get("/v1/quarantine", headers=key)).json()["data"]
            assert [(row["feedback_id"], row["job"]) for row in rows] == [(seen, job)]
            own = (await desk.client.get(f"/v1/quarantine?job={job}", headers=key)).json()["data"]
            assert own == rows
            assert (await desk.client.post(f"/v1/quarantine/{seen}/drop", headers=key)).status_code == 202
            foreign = other.id if job == desk.job else desk.job
            for method, path in (
                ("GET", f"/v1/quarantine?job={foreign}"),
                ("GET", f"/v1/jobs/{foreign}/quarantine/{hidden}"),
                ("GET", f"/v1/quarantine/{hidden}"),
                ("POST", f"/v1/quarantine/{hidden}/release"),
                ("POST", f"/v1/quarantine/{hidden}/drop"),
                ("POST", f"/v1/jobs/{foreign}/quarantine/{hidden}/release"),
            ):
                reply = await desk.client.request(method, path, headers=key)
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), path
        body = {"name": "k", "scopes": ["feedback:admin"], "models": ["nobody"]}
        none = {"authorization": f"Bearer {(await desk.client.post('/v1/keys', json=body)).json()['key']}"}
        assert (await desk.client.get("/v1/quarantine", headers=none)).json()["data"] == []


@pytest.mark.parametrize("of_job", [True, False])
@pytest.mark.parametrize("verdict", ["release", "drop"])
async def test_a_verdict_is_an_item_of_the_stream_once(desk: Any, verdict: str, of_job: bool) -> None:
    id = await held(desk)
    path = f"/v1/jobs/{desk.job}/quarantine/{id}/{verdict}" if of_job else f"/v1/quarantine/fb_{id}/{verdict}"
    reply = await desk.client.post(path)
    assert (reply.status_code, reply.json()["duplicate"]) == (202, False), reply.text
    assert (await desk.client.post(path)).json()["duplicate"] is True
    other = f"/v1/quarantine/{id}/{verdict}" if of_job else f"/v1/jobs/{desk.job}/quarantine/{id}/{verdict}"
    assert (await desk.client.post(other)).json()["duplicate"] is True, "it is the same verdict"
    items = [item for item in await desk.items() if item.kind == verdict]
    assert [(item.job, item.body) for item in items] == [(desk.job, {"feedback": id})]
    await desk.decide(FeedbackStatus(feedback=id, status="matched", time=3.0))
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
    for id, status in ((unheld, 409), (desk.new_id(), 404), ("nonsense", 404)):
        assert (await desk.client.get(f"/v1/quarantine/{id}")).status_code == status, id
        assert (await desk.client.post(f"/v1/quarantine/{id}/drop")).status_code == status, id
    other = f"/v1/jobs/job_{'0' * 32}/quarantine"
    assert (await desk.client.get(other)).status_code == 404


async def test_what_makes_room_is_taken_where_a_job_has_its_share(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator takes back what a source floods a job with."""
    flood = (await desk.accept())["feedback_id"]
    monkeypatch.setattr(desk.desk.ingest, "has_room", lambda job, key_id, nbytes: False)
    reply = await desk.post({"inference_id": desk.new_id(), "metric_name": "accepted", "value": True})
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "job_backlog_full")
    assert reply.headers["retry-after"] == "5"
    taken_back = await desk.client.post(f"/v1/feedback/{flood}/retract")
    assert taken_back.status_code == 202, taken_back.text
