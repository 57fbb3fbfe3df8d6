"""Keys for some models: every route limits them to jobs of these models; new routes refuse them by default."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastapi.routing import APIRoute
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.services.coordinator.api.app import ROUTERS
from penstock.services.coordinator.api.scopes import check_of, scope_of
from penstock.shared.protocol.keys import SCOPES

ROOT = {"authorization": "Bearer root"}
ALL_SCOPES = [scope for scope in SCOPES if scope != "admin"]
SCALE = "POST /v1/jobs/{job_id}/scale"
FINE_TUNING = {"model": "m", "training_file": "f", "hyperparameters": {}, "method": {"type": "supervised"}}
CHECKED = {
    "GET /v1/jobs", "POST /v1/jobs", "GET /v1/fine_tuning/jobs", "GET /v1/samples/{sample_id}",
    "GET /v1/models", "GET /v1/models/{model}", "GET /v1/models/{model}/versions", "POST /v1/models/{model}/rollback",
    "GET /e/{episode_id}/v1/models", "GET /e/{episode_id}/v1/models/{model}",
    "POST /v1/chat/completions", "POST /e/{episode_id}/v1/chat/completions",
    "POST /v1/completions", "POST /e/{episode_id}/v1/completions",
    "GET /v1/interactions/{interaction}",
    "POST /v1/episodes", "GET /v1/episodes", "GET /v1/episodes/{episode}", "POST /v1/episodes/{episode}/end",
    "POST /v1/episodes/{episode}/keys", "GET /v1/episodes/{episode}/interactions",
    "POST /v1/feedback", "POST /feedback", "POST /v1/feedback/batch", "POST /v1/feedback/tokens",
    "GET /v1/feedback/{feedback_id}", "POST /v1/feedback/{feedback_id}/retract",
    "GET /v1/quarantine", "GET /v1/quarantine/{item}",
    "POST /v1/quarantine/{item}/release", "POST /v1/quarantine/{item}/drop",
}  # fmt: skip
"""Routes that check the model of a request themselves: the first four are tested here, the others with the gateway
(``serving/test_episode_keys.py``) and with feedback (``feedback/test_quarantine.py``)."""


def routes() -> Iterator[tuple[str, APIRoute]]:
    """Yield every operation that needs a key, as ``METHOD PATH``, with its route."""
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and check_of(route) is not None:
                yield from ((f"{method} {route.path}", route) for method in sorted(route.methods or ()))


async def key_for(client: Any, *models: str, **more: Any) -> dict[str, str]:
    body = {"name": "k", "scopes": ALL_SCOPES, "models": list(models), **more}
    reply = await client.post("/v1/keys", json=body, headers=ROOT)
    assert reply.status_code == 201, reply.text
    return {"authorization": f"Bearer {reply.json()['key']}"}


def filled(path: str, job: str) -> str:
    """Return a path with the id of a job, and arbitrary values for its other parameters."""
    number = {"number": 0, "letter": 7, "job_id": job, "webhook_id": f"wh_{'0' * 32}", "sha256": "0" * 64}
    for name in [part.partition("}")[0] for part in path.split("{")[1:]]:
        path = path.replace(f"{{{name}}}", str(number.get(name, uuid.uuid4())))
    return path


async def refusal(client: Any, operation: str, job: str, key: dict[str, str]) -> str:
    """Send a request; return why its key is refused, or an empty string."""
    method, _, path = operation.partition(" ")
    body = None if method in ("GET", "DELETE") else {}
    reply = await client.request(method, filled(path, job), json=body, headers=key, params={"wait": 0})
    if reply.status_code == 404 and reply.json()["detail"] == f"no job '{job}'":
        return "no_job"
    return str(reply.json()["error"]["code"]) if reply.status_code == 403 else ""


def why(route: APIRoute, otherwise: str = "other_model") -> str:
    return "missing_scope" if scope_of(route) == "admin" else otherwise


async def test_no_route_of_a_job_lets_a_key_of_another_model_in(connect: Any, job: Any) -> None:
    of_jobs = {name: route for name, route in routes() if "{job_id}" in route.path}
    assert len(of_jobs) > 40
    async with connect(api_keys="root") as client:
        id = (await client.post("/v1/jobs", json=job, headers=ROOT)).json()["id"]
        other, own = await key_for(client, "other"), await key_for(client, job["name"])
        refused = {name: await refusal(client, name, id, other) for name in of_jobs}
        hidden = {name: why(route, "other_model" if name == SCALE else "no_job") for name, route in of_jobs.items()}
        assert refused == hidden, "a job of another model is no job"
        refused = {name: code for name in of_jobs if (code := await refusal(client, name, id, own))}
        assert refused == {SCALE: "other_model", **{n: why(r) for n, r in of_jobs.items() if scope_of(r) == "admin"}}
        by_id = await key_for(client, id)
        assert (await client.get(f"/v1/jobs/{id}", headers=by_id)).status_code == 200
        for unknown in (f"job_{'0' * 32}", "nonsense"):
            assert (await client.get(f"/v1/jobs/{unknown}", headers=own)).status_code == 404


async def test_every_other_route_checks_for_itself_or_lets_no_such_key_in(connect: Any, job: Any) -> None:
    elsewhere = {name: route for name, route in routes() if "{job_id}" not in route.path}
    reaches = {name: check.reach for name, route in elsewhere.items() if (check := check_of(route)) is not None}
    assert {name for name, reach in reaches.items() if reach == "checked"} == CHECKED
    closed = {name: route for name, route in elsewhere.items() if name not in CHECKED}
    assert {"GET /v1/files", "GET /metrics", "DELETE /v1/users/{user}/data"} <= closed.keys()
    async with connect(api_keys="root") as client:
        id = (await client.post("/v1/jobs", json=job, headers=ROOT)).json()["id"]
        own = await key_for(client, job["name"], id)
        refused = {name: await refusal(client, name, id, own) for name in closed}
        assert refused == {name: why(route) for name, route in closed.items()}


async def test_lists_show_the_jobs_of_its_models(connect: Any, deployment: Any, job: Any) -> None:
    async with connect(api_keys="root") as client:
        names = ("mine", "theirs", "mine", "third")
        ids = [deployment.submit({**job, "name": name}, fine_tuning=FINE_TUNING) for name in names]
        key = await key_for(client, "mine", ids[3])
        own = [ids[3], ids[2], ids[0]]
        page = (await client.get("/v1/jobs", params={"limit": 2}, headers=key)).json()
        assert ([row["id"] for row in page["data"]], page["has_more"]) == (own[:2], True)
        rest = (await client.get("/v1/jobs", params={"after": own[1]}, headers=key)).json()
        assert ([row["id"] for row in rest["data"]], rest["has_more"]) == (own[2:], False)
        assert (await client.get("/v1/jobs", params={"name": "theirs"}, headers=key)).json()["data"] == []
        for path in ("/v1/jobs", "/v1/fine_tuning/jobs"):
            assert [row["id"] for row in (await client.get(path, headers=key)).json()["data"]] == own
            assert len((await client.get(path, headers=ROOT)).json()["data"]) == 4
        for id in ids[:2]:
            deployment.train(id)
        shown = await client.get(f"/v1/samples/{ids[0]}-2-3.0-1", headers=key)
        assert (shown.status_code, shown.json()["job"]) == (200, ids[0])
        hidden = await client.get(f"/v1/samples/{ids[1]}-2-3.0-1", headers=key)
        assert (hidden.status_code, hidden.json()["detail"]) == (404, f"no job '{ids[1]}'")


async def test_it_submits_jobs_of_its_names_from_checkpoints_of_its_jobs(
    connect: Any, deployment: Any, job: Any
) -> None:
    async with connect(api_keys="root") as client:
        theirs = (await client.post("/v1/jobs", json={**job, "name": "theirs"}, headers=ROOT)).json()["id"]
        key = await key_for(client, "mine")
        mine = await client.post("/v1/jobs", json={**job, "name": "mine"}, headers=key)
        assert mine.status_code == 202, mine.text
        submitted = deployment.submitted
        wanted = {**job, "name": "mine", "model": {"path": f"job:{theirs}@best"}}
        for body in ({**job, "name": "theirs"}, wanted):
            for query in ("", "?dry_run=true"):
                refused = await client.post(f"/v1/jobs{query}", json=body, headers=key)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "other_model"), refused.text
        assert deployment.submitted == submitted
        for origin in (mine.json()["id"], f"job_{'0' * 32}"):  # whether it is there is looked up with the submission
            body = {**wanted, "model": {"path": f"job:{origin}@best"}}
            reply = await client.post("/v1/jobs", json=body, headers=key)
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_job"), reply.text


async def test_no_such_key_may_do_everything(connect: Any) -> None:
    async with connect() as client:
        reply = await client.post("/v1/keys", json={"name": "k", "scopes": ["jobs:read", "admin"], "models": ["a"]})
        assert (reply.status_code, "reaches others" in reply.json()["detail"]) == (422, True)


async def test_models_that_no_job_has(connect: Any, served: Any, job: Any) -> None:
    """A key may name a future job, with a warning; a name that no job can have is refused."""
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        for wrong, detail in (
            (f"job_{'0' * 32}", "there is no job"), ("My Model", "should match pattern"), (f"{id}@3", "should match"),
        ):  # fmt: skip
            body = {"name": "k", "scopes": ["jobs:read"], "models": [job["name"], wrong]}
            reply = await client.post("/v1/keys", json=body)
            flaw = reply.json()["errors"][0]
            assert (reply.status_code, flaw["pointer"], detail in flaw["detail"]) == (422, "/models/1", True), wrong
        body = {"name": "k", "scopes": ["jobs:read"], "models": [job["name"], id, "later"]}
        created = (await client.post("/v1/keys", json=body)).json()
        assert created["warnings"] == ["models: there is no job named 'later' yet"]
    words = ["keys", "create", "k", "--scopes", "jobs:read", "--models", "later"]
    shown = CliRunner().invoke(cli, words, env={"PENSTOCK_URL": served.url})
    assert (shown.exit_code, "warning: models: there is no job named 'later' yet" in shown.stderr) == (0, True)
