"""The audit log: which requests leave a record of their sender, and which keys may read the records."""

from __future__ import annotations

import hashlib
import logging
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.services.coordinator.api.app import ROUTERS
from penstock.services.coordinator.api.audited import DATA_PATHS, audited_routes, route_of
from penstock.shared.protocol import subjects
from penstock.shared.runtime.metrics import render

ROOT = {"authorization": "Bearer root"}
OF_AGENTS = {
    "POST /v1/chat/completions", "POST /v1/completions", "POST /e/{episode_id}/v1/chat/completions",
    "POST /e/{episode_id}/v1/completions", "POST /feedback", "POST /v1/feedback", "POST /v1/feedback/batch",
    "POST /v1/feedback/tokens", "POST /v1/episodes", "POST /v1/episodes/{episode}/end",
    "POST /v1/episodes/{episode}/keys",
}  # fmt: skip
"""Routes of agents, which change data and leave no record; add a route only for a good reason."""


async def create_key(client: Any, *scopes: str) -> tuple[str, dict[str, str]]:
    body = {"name": "ops", "scopes": list(scopes)}
    reply = (await client.post("/v1/keys", json=body, headers=ROOT)).json()
    return reply["id"], {"authorization": f"Bearer {reply['key']}"}


async def test_every_route_that_changes_something_is_audited_or_of_agents(connect: Any) -> None:
    async with connect() as client:
        document = (await client.get("/openapi.json")).json()
    changing = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
        if method not in ("get", "head", "options")
    }
    routes = audited_routes(ROUTERS)
    found = {}
    for operation in changing:
        method, path = operation.split()
        found[operation] = route_of(routes, method, re.sub("{[^}]+}", "x", path))
    assert {operation for operation, route in found.items() if route is None} == OF_AGENTS
    assert {f"{route.method} {route.template}" for route in routes} == changing - OF_AGENTS
    wrong = {name: one[0].template for name, one in found.items() if one and one[0].template != name.split()[1]}
    assert wrong == {}, "a template before it takes its requests"
    assert {f"POST {path}" for path in DATA_PATHS} == OF_AGENTS


async def test_a_record_names_the_sender_the_request_and_its_status(connect: Any, deployment: Any, job: Any) -> None:
    async with connect(api_keys="root") as client:
        id, bearer = await create_key(client, "jobs:write", "jobs:read")
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {**bearer, "traceparent": f"00-{trace}-00f067aa0ba902b7-01", "idempotency-key": "mine"}
        posted = await client.post("/v1/jobs", json=job, headers=headers)
        ref = posted.json()["id"]
        for _ in range(2):
            await client.get("/v1/jobs", headers=bearer)
        assert (await client.post("/v1/jobs", json=job, headers=headers)).headers["idempotent-replayed"] == "true"
        await client.post(f"/v1/jobs/{ref}/cancel?force=true&more=x", headers=bearer)
    _, submitted, again, cancelled = deployment.audit_log
    assert (submitted.key, submitted.key_name, submitted.address) == (id, "ops", "127.0.0.1")
    assert (submitted.method, submitted.route, submitted.status) == ("POST", "/v1/jobs", 202)
    assert (submitted.job, submitted.location, submitted.trace) == (ref, f"/v1/jobs/{ref}", trace)
    assert (submitted.idempotency_key, submitted.replayed, again.replayed, again.job) == ("mine", False, True, ref)
    assert submitted.body_sha256 == again.body_sha256 == hashlib.sha256(posted.request.content).hexdigest()
    assert posted.headers["x-request-id"] == submitted.request != again.request
    assert (cancelled.path, cancelled.query, cancelled.job) == ({"job_id": ref}, {"force": "true"}, ref)
    assert cancelled.body_sha256 == ""


async def test_the_key_itself_is_stored_nowhere(connect: Any, deployment: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        async with connect(api_keys="root") as client:
            reply = await client.post("/v1/keys", json={"name": "ops", "scopes": ["admin"]}, headers=ROOT)
    (record,) = deployment.audit_log
    assert record.location == f"/v1/keys/{reply.json()['id']}"
    assert record.key_name == "PENSTOCK_API_KEYS"
    assert reply.json()["key"] not in str(record) + str([vars(line) for line in caplog.records])


async def test_an_unauthorized_request_leaves_only_a_line_in_the_log(
    connect: Any, deployment: Any, job: Any, caplog: Any
) -> None:
    async with connect(api_keys="root") as client:
        id, reader = await create_key(client, "jobs:read")
        writer, bearer = await create_key(client, "jobs:write")
        with caplog.at_level(logging.INFO):
            assert (await client.post("/v1/jobs", json=job)).status_code == 401
            assert (await client.post("/v1/jobs", json=job, headers=reader)).status_code == 403
            assert deployment.audit_log[2:] == []
            for headers in ({**bearer, "idempotency-key": ""}, bearer):
                await client.post("/v1/jobs", json={}, headers=headers)
            missing = f"/v1/jobs/job_{'0' * 32}/pause"
            assert (await client.post(missing, headers=bearer)).status_code == 404
    assert [one.status for one in deployment.audit_log[2:]] == [400, 422, 404]
    assert {one.key for one in deployment.audit_log[2:]} == {writer}
    lines = [vars(one) for one in caplog.records if one.name.endswith(".audited")]
    assert [(one["key"], one["status"]) for one in lines] == [(id, 403), (writer, 400), (writer, 422), (writer, 404)]


async def test_a_record_that_cannot_be_stored_delays_no_request(
    connect: Any, deployment: Any, job: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.services.coordinator.access.APPEND_S", 0.2)

    def lost() -> float:
        found = re.search(rb'penstock_audit_records_total{outcome="lost"} (\S+)', render())
        return float(found[1]) if found is not None else 0.0

    before = lost()
    deployment.remove(subjects.AUDIT)
    async with connect() as client:
        reply = await client.post("/v1/jobs", json=job)
    assert (reply.status_code, len(deployment.jobs)) == (202, 1)
    assert lost() == before + 1
    (line,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert reply.headers["x-request-id"] in line.getMessage()
    assert vars(line)["record"]["key"] == "local"


async def test_only_administrators_read_it_page_by_page(connect: Any, deployment: Any, job: Any) -> None:
    async with connect(api_keys="root") as client:
        id, bearer = await create_key(client, "jobs:write", "jobs:read", "feedback:admin")
        jobs = [(await client.post("/v1/jobs", json=job, headers=bearer)).json()["id"] for _ in range(3)]
        assert (await client.get("/v1/audit-log", headers=bearer)).status_code == 403
        first = (await client.get("/v1/audit-log?limit=3&order=asc", headers=ROOT)).json()
        assert ([row["id"] for row in first["data"]], first["has_more"], first["last_id"]) == ([1, 2, 3], True, 3)
        second = (await client.get("/v1/audit-log?limit=3&after=3&order=asc", headers=ROOT)).json()
        assert ([row["job"] for row in second["data"]], second["has_more"]) == (jobs[2:], False)
        newest = (await client.get("/v1/audit-log?limit=3", headers=ROOT)).json()
        assert ([row["id"] for row in newest["data"]], newest["has_more"], newest["last_id"]) == ([4, 3, 2], True, 2)
        oldest = (await client.get("/v1/audit-log?limit=3&after=2", headers=ROOT)).json()
        assert ([row["id"] for row in oldest["data"]], oldest["has_more"]) == ([1], False)
        for query, count in ((f"key={id}", 3), (f"job={jobs[0]}", 1), ("since=9e10", 0), ("key=nobody", 0)):
            rows = (await client.get(f"/v1/audit-log?{query}", headers=ROOT)).json()["data"]
            assert len(rows) == count, query
        assert (await client.get("/v1/audit-log?since=yesterday", headers=ROOT)).status_code == 422


@pytest.mark.long
@pytest.mark.parametrize("many", [3, 120])
async def test_clients_and_the_command_read_all_pages(served: Any, deployment: Any, job: Any, many: int) -> None:
    with Client(served.url) as client:
        other, id = client.submit(job).id, client.submit(job).id
        for _ in range(many):
            client.pause(id)
        rows = client.audit_log.list(job=id, limit=1000, order="asc")
        assert client.audit_log.list(key="local", limit=2) == rows[:-3:-1]
        assert client.audit_log.list(job=id, limit=1000) == rows[::-1]
        assert [row.job for row in client.audit_log.list(job=other, limit=1)] == [other]
    assert [row.route for row in rows] == ["/v1/jobs"] + ["/v1/jobs/{job_id}/pause"] * many
    async with AsyncClient(served.url) as aclient:
        assert await aclient.audit_log.list(since=0.0, job=id, limit=1000, order="asc") == rows
    env = {"PENSTOCK_URL": served.url, "COLUMNS": "250"}
    shown = CliRunner().invoke(cli, ["audit-log", "--job", id, "--since", "1h"], env=env)
    assert (shown.exit_code, shown.output.count(f"POST /v1/jobs/{id}/pause")) == (0, many)
    assert CliRunner().invoke(cli, ["audit-log", "--since", "soon"], env=env).exit_code == 2
