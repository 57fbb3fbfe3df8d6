"""Quarantined feedback over HTTP: any replica lists and shows it, and verdicts on it are items of the stream."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.protocol.live.interaction import FeedbackStatus, new_marked_id


async def held(live: Any, **body: Any) -> str:
    """Post an item and quarantine it, as the leader does; return its id."""
    id = (await live.accept(**body))["feedback_id"]
    await live.decide(FeedbackStatus(feedback=id, status="quarantined", reason="outlier: 1 is far", time=2.0))
    return str(id)


async def test_quarantined_feedback_is_listed_and_shown(live: Any) -> None:
    target = live.new_id()
    first = await held(live, inference_id=target, metric_name="score", value=0.75, weight=0.5)
    second = await held(live)
    await live.accept()
    path = f"/v1/jobs/{live.job}/quarantine"
    page = (await live.client.get(path)).json()
    assert {row["feedback_id"] for row in page["data"]} == {first, second}
    one = (await live.client.get(f"{path}?limit=1")).json()
    rest = (await live.client.get(f"{path}?after={one['last_id']}")).json()
    assert (one["has_more"], len(rest["data"]), rest["has_more"]) == (True, 1, False)
    shown = (await live.client.get(f"{path}/fb_{first}")).json()
    assert (await live.client.get(f"/v1/quarantine/{first}")).json() == shown
    assert (shown["metric"], shown["value"], shown["target"], shown["weight"]) == ("score", 0.75, target, 0.5)
    assert shown["reason"] == "outlier: 1 is far"
    assert (await live.status_of(first))["status"] == "quarantined"


async def test_quarantined_feedback_of_all_jobs_is_one_list(live: Any) -> None:
    other = await live.store.create(parse_job({**(await live.store.get(live.job)).spec, "name": "other"}))
    live.service.jobs.know((await live.store.index()).get(other.id))
    here = sorted([await held(live), await held(live)])
    there = await held(live, inference_id=new_marked_id(other.id))
    await live.accept()
    rows = (await live.client.get("/v1/quarantine")).json()["data"]
    assert [(row["feedback_id"], row["job"]) for row in rows] == sorted(
        [(here[0], live.job), (here[1], live.job), (there, other.id)]
    )
    paged, after = [], ""
    for more in (True, True, False):
        page = (await live.client.get(f"/v1/quarantine?limit=1&after={after}")).json()
        assert (page["has_more"], page["first_id"]) == (more, page["last_id"])
        paged, after = paged + page["data"], page["last_id"]
    assert paged == rows
    for job, ids in ((live.job, here), (other.id, [there])):
        page = (await live.client.get(f"/v1/quarantine?job={job}")).json()
        assert [row["feedback_id"] for row in page["data"]] == ids
        assert page == (await live.client.get(f"/v1/jobs/{job}/quarantine")).json()
    assert (await live.client.get(f"/v1/quarantine?job=job_{'0' * 32}")).status_code == 404
    assert (await live.client.get("/v1/quarantine?job=%C2%99")).status_code == 404
    assert (await live.client.get("/v1/quarantine?limit=0")).status_code == 422


async def test_the_list_of_all_jobs_needs_its_scope(open_live: Any) -> None:
    root = {"authorization": "Bearer root"}
    async with open_live(api_keys="root") as live:
        for scope, status in (("feedback:write", 403), ("jobs:read", 403), ("feedback:admin", 200)):
            created = await live.client.post("/v1/keys", json={"name": "k", "scopes": [scope]}, headers=root)
            key = {"authorization": f"Bearer {created.json()['key']}"}
            assert (await live.client.get("/v1/quarantine", headers=key)).status_code == status, scope
        assert (await live.client.get("/v1/quarantine")).status_code == 401


async def test_a_key_for_some_models_sees_only_their_quarantined_feedback(open_live: Any) -> None:
    root = {"authorization": "Bearer root"}
    async with open_live(api_keys="root") as live:
        live.client.headers.update(root)
        other = await live.store.create(parse_job({**(await live.store.get(live.job)).spec, "name": "other"}))
        live.service.jobs.know((await live.store.index()).get(other.id))
        here, there = await held(live), await held(live, inference_id=new_marked_id(other.id))
        for model, job, seen, hidden in (("policy", live.job, here, there), (other.id, other.id, there, here)):
            body = {"name": "k", "scopes": ["feedback:admin"], "models": [model]}
            created = await live.client.post("/v1/keys", json=body)
            key = {"authorization": f"Bearer {created.json()['key']}"}
            rows = (await live.client.get("/v1/quarantine", headers=key)).json()["data"]
            assert [(row["feedback_id"], row["job"]) for row in rows] == [(seen, job)]
            own = (await live.client.get(f"/v1/quarantine?job={job}", headers=key)).json()["data"]
            assert own == rows
            assert (await live.client.post(f"/v1/quarantine/{seen}/drop", headers=key)).status_code == 202
            foreign = other.id if job == live.job else live.job
            for method, path in (
                ("GET", f"/v1/quarantine?job={foreign}"),
                ("GET", f"/v1/jobs/{foreign}/quarantine/{hidden}"),
                ("GET", f"/v1/quarantine/{hidden}"),
                ("POST", f"/v1/quarantine/{hidden}/release"),
                ("POST", f"/v1/quarantine/{hidden}/drop"),
                ("POST", f"/v1/jobs/{foreign}/quarantine/{hidden}/release"),
            ):
                reply = await live.client.request(method, path, headers=key)
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), path
        body = {"name": "k", "scopes": ["feedback:admin"], "models": ["nobody"]}
        none = {"authorization": f"Bearer {(await live.client.post('/v1/keys', json=body)).json()['key']}"}
        assert (await live.client.get("/v1/quarantine", headers=none)).json()["data"] == []


@pytest.mark.parametrize("of_job", [True, False])
@pytest.mark.parametrize("verdict", ["release", "drop"])
async def test_a_verdict_is_an_item_of_the_stream_once(live: Any, verdict: str, of_job: bool) -> None:
    id = await held(live)
    path = f"/v1/jobs/{live.job}/quarantine/{id}/{verdict}" if of_job else f"/v1/quarantine/fb_{id}/{verdict}"
    reply = await live.client.post(path)
    assert (reply.status_code, reply.json()["duplicate"]) == (202, False), reply.text
    assert (await live.client.post(path)).json()["duplicate"] is True
    other = f"/v1/quarantine/{id}/{verdict}" if of_job else f"/v1/jobs/{live.job}/quarantine/{id}/{verdict}"
    assert (await live.client.post(other)).json()["duplicate"] is True, "it is the same verdict"
    items = [item for item in await live.items() if item.kind == verdict]
    assert [(item.job, item.body) for item in items] == [(live.job, {"feedback": id})]
    await live.decide(FeedbackStatus(feedback=id, status="matched", time=3.0))
    gone = await live.client.post(path)
    assert (gone.status_code, "it is matched" in gone.text) == (409, True)
    counted = (await live.client.get(f"/v1/jobs/{live.job}/feedback")).json()
    assert counted["items"] == 1, "a verdict is no feedback"


async def test_only_quarantined_feedback_of_the_job_is_found(live: Any) -> None:
    path = f"/v1/jobs/{live.job}/quarantine"
    unheld = (await live.accept())["feedback_id"]
    assert (await live.client.get(f"{path}/{unheld}")).status_code == 409
    assert (await live.client.get(f"{path}/{live.new_id()}")).status_code == 404
    assert (await live.client.get(f"{path}/nonsense")).status_code == 404
    for id, status in ((unheld, 409), (live.new_id(), 404), ("nonsense", 404)):
        assert (await live.client.get(f"/v1/quarantine/{id}")).status_code == status, id
        assert (await live.client.post(f"/v1/quarantine/{id}/drop")).status_code == status, id
    other = f"/v1/jobs/job_{'0' * 32}/quarantine"
    assert (await live.client.get(other)).status_code == 404


async def test_a_retraction_is_accepted_although_the_backlog_of_the_job_is_full(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator can retract the feedback with which a source floods a job."""
    flood = (await live.accept())["feedback_id"]
    monkeypatch.setattr(live.service.ingest, "has_room", lambda job, key_id, nbytes: False)
    reply = await live.post({"inference_id": live.new_id(), "metric_name": "accepted", "value": True})
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "job_backlog_full")
    assert reply.headers["retry-after"] == "5"
    taken_back = await live.client.post(f"/v1/feedback/{flood}/retract")
    assert taken_back.status_code == 202, taken_back.text
