"""HTTP conventions of the job API: problems, pagination, keys, limits, long polls."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import yaml

from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.api.guard import MAX_BODY_BYTES
from penstock.services.coordinator.queries.diagnosis import Diagnosis
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import JobFailure, JobRecord

TOO_BIG = {"limits": {"byte_budget": 1 << 51}}
YAML = {"content-type": "application/yaml"}


def assert_problem(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["type"] == f"urn:penstock:problem:{code}"
    assert body["error"] == {**body["error"], "message": body["detail"], "code": code}
    return body


async def test_submit_list_get(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        created = await client.post("/v1/jobs", json=job)
        assert created.status_code == 202
        record = JobRecord.model_validate(created.json())
        assert created.headers["location"] == f"/v1/jobs/{record.id}"
        assert created.headers["etag"] == '"1"'
        assert (await client.get(f"/v1/jobs/{record.id}")).json() == created.json()
        assert (await client.get("/v1/jobs")).json()["data"] == [created.json()]
    assert JobConfig.parse(deployment.jobs[record.id].spec) == JobConfig.parse(job)


async def test_a_job_shows_its_progress(connect: Any, deployment: Any, job: Any) -> None:
    """Progress is computed from the other fields of the status: it is shown, and not stored."""
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        deployment.advance(id, "running", step=3, total_steps=12, draws={"drawn": 9, "trained": 6, "in_flight": 3})
        status = (await client.get(f"/v1/jobs/{id}")).json()["status"]
        assert status["progress"] == {"step": 3, "max_steps": 12, "fraction": 0.25, "groups": 6}
        deployment.advance(id, "running", step=13, total_steps=None)
        status = (await client.get(f"/v1/jobs/{id}")).json()["status"]
        assert (status["progress"]["max_steps"], status["progress"]["fraction"]) == (None, None)
    assert JobRecord.model_validate_json(deployment.jobs[id].stored()) == deployment.jobs[id]
    assert b"progress" not in deployment.jobs[id].stored()


async def test_a_job_shows_links_to_its_views_and_why_it_failed(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        record = JobRecord.model_validate((await client.post("/v1/jobs", json=job)).json())
        error = JobFailure(code="trainer_failed", message="trainer: no room", service="trainer")
        deployment.write_log(record.id)
        deployment.advance(record.id, "failed", message=error.message, error=error, attempt=3)
        shown = (await client.get(f"/v1/jobs/{record.id}")).json()
        assert set(shown["links"]) == {"self", "events", "metrics", "checkpoints", "logs"}
        for name, path in shown["links"].items():
            assert (await client.get(path)).status_code == 200, name
        assert (await client.get(shown["links"]["self"])).json() == shown
        status = shown["status"]
        assert status["error"] == {"code": "trainer_failed", "message": "trainer: no room", "service": "trainer"}
        assert (status["attempt"], status["heartbeat_at"] > shown["created_at"]) == (3, True)
        assert (read := JobRecord.model_validate(shown)).status.error == error, "the Python client parses it"
        assert read.links.logs == shown["links"]["logs"]
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert set(schemas["JobLinks"]["properties"]) == set(shown["links"])
    assert "links" in schemas["JobRecord"]["required"]
    assert set(schemas["JobFailure"]["properties"]) == set(status["error"])


async def test_yaml_and_json_give_the_same_job(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        reply = await client.post("/v1/jobs", content=yaml.safe_dump(job), headers=YAML)
        assert reply.status_code == 202
        assert JobConfig.parse(deployment.jobs[reply.json()["id"]].spec) == JobConfig.parse(job)


async def test_dry_run_stores_nothing(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        reply = await client.post("/v1/jobs?dry_run=true", json=job)
    assert reply.status_code == 200
    assert (reply.json()["valid"], reply.json()["plan"]["batch"]["groups"]) == (True, 2)
    assert deployment.submitted == 0


async def test_invalid_job_names_every_flaw(connect: Any, job: Any) -> None:
    job["train"]["max_update"] = 3
    job["data"]["train"]["digits"] = 99
    job["reward"] = {"scorers": [{"type": "mathh"}]}
    async with connect() as client:
        body = assert_problem(await client.post("/v1/jobs", json=job), 422, "invalid_job")
    flaws = {flaw["pointer"]: flaw["detail"] for flaw in body["errors"]}
    assert flaws["/train/max_update"] == "unknown key; did you mean 'max_updates'?"
    assert "less than or equal to 9" in flaws["/data/train/digits"]
    assert flaws["/reward/scorers/0/type"].startswith("found 'mathh'; did you mean 'math'? there are: 'exact', 'math',")
    assert body["error"]["param"] in flaws


async def test_algorithms_that_need_groups_are_refused_for_online_jobs(connect: Any, deployment: Any, job: Any) -> None:
    spec = {"kind": "online_rl", "name": "live", "model": job["model"]}
    async with connect() as client:
        for name in ("grpo", "rloo"):
            body = {**spec, "algorithm": {"type": name}}
            problem = assert_problem(await client.post("/v1/jobs", json=body), 422, "invalid_job")
            (flaw,) = problem["errors"]
            assert flaw["pointer"] == "/algorithm"
            assert f"type '{name}' needs several answers to the same prompt" in flaw["detail"]
        assert deployment.submitted == 0
        assert (await client.post("/v1/jobs?dry_run=true", json=spec)).status_code == 200


async def test_what_only_the_coordinator_can_refuse(connect: Any, job: Any) -> None:
    async with connect() as client:
        body = assert_problem(await client.post("/v1/jobs", json=TOO_BIG | job), 422, "invalid_job")
    assert "exceed the EXPERIENCE stream" in body["detail"]


HOSTILE = [
    (b"{", "application/json", 400, "malformed_json"),
    (b"a: [", "application/yaml", 400, "malformed_yaml"),
    (b"a: \xff\xfe", "application/yaml", 400, "malformed_yaml"),
    (b"[1]", "application/json", 422, "invalid_body"),
    (b"", "application/yaml", 422, "invalid_body"),
    (b"{}", "text/plain", 415, "unsupported_media_type"),
    (b"{}", "", 415, "unsupported_media_type"),
    (b"name: .inf", "application/yaml", 422, "invalid_job"),
    (b"1: x", "application/yaml", 422, "invalid_job"),
    (b"name: 2024-01-01", "application/yaml", 422, "invalid_job"),
    (b'{"seed": 99999999999999999999}', "application/json", 422, "invalid_job"),
    (b"[" * 400_000, "application/yaml", 422, "too_complex"),
    (b"[" * 400_000, "application/json", 422, "too_complex"),
    (b"&a [*a]", "application/yaml", 422, "too_complex"),
    (
        b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefgh"
        ), "application/yaml", 422, "too_complex",
    ),
]  # fmt: skip


async def test_hostile_bodies(connect: Any) -> None:
    async with connect() as client:
        for content, kind, status, code in HOSTILE:
            began = time.process_time()  # of this process alone: the machine may be busy
            reply = await client.post("/v1/jobs", content=content, headers={"content-type": kind})
            assert_problem(reply, status, code)
            assert time.process_time() - began < 5, content[:40]


async def test_a_body_is_cut_off_while_it_streams_in(connect: Any) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 64 << 20:
            sent += 1 << 16
            yield b" " * (1 << 16)

    async with connect() as client:
        reply = await client.post("/v1/jobs", content=endless(), headers={"content-type": "application/json"})
        assert_problem(reply, 413, "too_large")
        assert reply.json()["max_bytes"] == MAX_BODY_BYTES
        assert sent <= MAX_BODY_BYTES + (1 << 17)
        reply = await client.post("/v1/jobs", content=b" " * (MAX_BODY_BYTES + 1))
        assert_problem(reply, 413, "too_large")


async def test_pages_are_stable_under_inserts(connect: Any, job: Any) -> None:
    async with connect() as client:
        ids = [(await client.post("/v1/jobs", json=job)).json()["id"] for _ in range(5)]
        first = (await client.get("/v1/jobs?limit=2")).json()
        assert first["has_more"]
        await client.post("/v1/jobs", json=job)
        rest = (await client.get("/v1/jobs", params={"limit": 10, "after": first["last_id"]})).json()
        seen = [row["id"] for row in first["data"] + rest["data"]]
        assert seen == ids[::-1]
        assert not rest["has_more"]
        up = (await client.get("/v1/jobs?order=asc&limit=5")).json()
        assert [row["id"] for row in up["data"]] == ids


async def test_steering_is_idempotent_and_ends_with_the_job(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        path = "/v1/jobs/" + (await client.post("/v1/jobs", json=job)).json()["id"]
        for verb, state in (("pause", "paused"), ("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
            reply = await client.post(f"{path}/{verb}")
            assert (reply.status_code, reply.json()["desired_state"]) == (202, state)
        deployment.advance(path.rpartition("/")[2], "cancelled")
        reply = await client.post(f"{path}/pause")
        assert_problem(reply, 409, "conflict")
        assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/v1/jobs/nope", "/v1/jobs/job_" + "0" * 32, "/v1/jobs/job_>/why", "/v1/nothing"])
async def test_unknown_things_are_404(connect: Any, path: str) -> None:
    async with connect() as client:
        assert_problem(await client.get(path), 404, "no_such_route" if path == "/v1/nothing" else "not_found")


async def test_method_and_parameter_problems(connect: Any) -> None:
    async with connect() as client:
        reply = await client.put("/v1/jobs")
        assert_problem(reply, 405, "method_not_allowed")
        assert set(reply.headers["allow"].split(", ")) == {"GET", "POST"}
        assert (await client.put("/v1/jobs/x/cancel")).headers["allow"] == "POST"
        body = assert_problem(await client.get("/v1/jobs?limit=0"), 422, "invalid_request")
        assert body["errors"][0]["pointer"] == "/query/limit"


async def test_keys(connect: Any, job: Any) -> None:
    async with connect(api_keys="alpha, beta", http_host="0.0.0.0") as client:
        reply = await client.get("/v1/jobs")
        assert_problem(reply, 401, "invalid_api_key")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        for headers, status in (
            ({"authorization": "Bearer alpha"}, 200),
            ({"authorization": "bearer beta"}, 200),
            ({"x-api-key": "beta"}, 200),
            ({"authorization": "Bearer alph"}, 401),
            ({"authorization": "Basic alpha"}, 401),
            ({"authorization": "Bearer "}, 401),
        ):
            assert (await client.get("/v1/jobs", headers=headers)).status_code == status, headers
        for path in ("/healthz", "/readyz", "/v1/version", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/metrics")).status_code == 401, "it names jobs; the health port asks for no key"
        assert (await client.get("/metrics", headers={"authorization": "Bearer alpha"})).status_code == 200


async def test_open_to_the_network_without_keys_is_refused(deployment: Any) -> None:
    async with deployment.services(http_host="0.0.0.0") as services:
        with pytest.raises(ConfigError, match="PENSTOCK_API_KEYS"):
            create_app(services)


HEADERS_OF_PAGES = [
    ({"host": "evil.example"}, 403),
    ({"host": "localhost:8000"}, 200),
    ({"host": "[::1]:8000"}, 200),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "http://localhost:3000"}, 200),
    ({"origin": "null"}, 403),
]


async def test_web_pages_cannot_use_a_keyless_api(connect: Any) -> None:
    async with connect() as client:
        for headers, status in HEADERS_OF_PAGES:
            assert (await client.get("/v1/jobs", headers=headers)).status_code == status, headers


async def test_rate_limit(connect: Any) -> None:
    async with connect(rate_limit="3/minute") as client:
        for left in (2, 1, 0):
            reply = await client.get("/v1/jobs")
            assert reply.status_code == 200
            assert reply.headers["ratelimit-policy"] == '"requests";q=3;w=60'
            assert reply.headers["ratelimit"].startswith(f'"requests";r={left};t=')
        reply = await client.get("/v1/jobs")
        assert_problem(reply, 429, "rate_limited")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert (await client.get("/healthz")).status_code == 200


async def test_live_requests_are_counted_apart(connect: Any) -> None:
    async with connect(rate_limit="1/minute", live_rate_limit="2/minute") as client:
        for allowed in (True, True, False):
            reply = await client.post("/v1/feedback", json={})
            assert (reply.status_code != 429) is allowed
        assert (await client.get("/v1/jobs")).status_code == 200


async def test_a_rate_limit_that_cannot_be_read(deployment: Any) -> None:
    async with deployment.services(rate_limit="often") as services:
        with pytest.raises(ConfigError, match="600/minute"):
            create_app(services)


async def test_etag_and_not_modified(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        record = (await client.post("/v1/jobs", json=job)).json()
        path = f"/v1/jobs/{record['id']}"
        same = await client.get(path, headers={"if-none-match": '"1"'})
        assert (same.status_code, same.content) == (304, b"")
        deployment.advance(record["id"], "running")
        assert (await client.get(path, headers={"if-none-match": '"1"'})).headers["etag"] == '"2"'


async def test_long_poll(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        began = time.perf_counter()
        reply = await client.get(f"/v1/jobs/{id}?wait=0.3")
        assert reply.json()["status"]["phase"] == "pending"
        assert 0.3 <= time.perf_counter() - began < 20
        poll = asyncio.create_task(client.get(f"/v1/jobs/{id}?wait=30&for=running"))
        await asyncio.sleep(0.1)
        deployment.advance(id, "running")
        assert (await poll).json()["status"]["phase"] == "running"
        poll = asyncio.create_task(client.get(f"/v1/jobs/{id}?wait=30&for=paused"))
        await asyncio.sleep(0.1)
        deployment.advance(id, "failed")
        assert (await poll).json()["status"]["phase"] == "failed"


@pytest.mark.long
async def test_errors_of_the_bus_are_503_with_retry_after(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        deployment.server.kill()
        reply = await client.get(f"/v1/jobs/{id}")
        assert_problem(reply, 503, "unavailable")
        assert reply.headers["retry-after"] == "1"
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200


async def test_defects_show_no_internals(connect: Any, deployment: Any, job: Any, monkeypatch: Any) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(Diagnosis, "why", broken)
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        reply = await client.get(f"/v1/jobs/{id}/why")
        assert_problem(reply, 500, "internal")
        assert "secret" not in reply.text


async def test_views_of_a_job(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        deployment.measure(id)
        deployment.beat(id)
        deployment.explain(id)
        deployment.train(id)
        deployment.write_log(id)
        deployment.repeat()
        metrics = (await client.get(f"/v1/jobs/{id}/metrics?names=reward")).json()
        assert metrics["series"] == {"reward": [0.1, 0.2, None, 0.5, 0.9]}
        assert (await client.get(f"/v1/jobs/{id}/workers")).json()["data"][0]["worker"] == "rollout-0"
        page = (await client.get(f"/v1/jobs/{id}/samples?limit=10")).json()
        assert (len(page["data"]), page["has_more"]) == (10, True)
        assert (await client.get(f"/v1/jobs/{id}/why")).json()["data"][0]["holder"] == "rollout-0"
        assert (await client.get(f"/v1/jobs/{id}/audit")).json()["ok"]
        assert (await client.get(f"/v1/jobs/{id}/logs?tail=2")).json()["lines"][1]["text"] == f"line 2 of {id}"
        refused = await client.post(f"/v1/jobs/{id}/replay")
        assert_problem(refused, 409, "conflict")
        deployment.advance(id, "succeeded")
        replay = await client.post(f"/v1/jobs/{id}/replay", json={"from_batch": 1})
        assert replay.headers["content-type"] == "application/x-ndjson"
        assert len(replay.text.splitlines()) == 3
        assert_problem(await client.post(f"/v1/jobs/{id}/replay", json={"from": 1}), 422, "invalid_body")


async def test_limits_version_and_prometheus(connect: Any) -> None:
    async with connect() as client:
        limits = (await client.get("/v1/limits")).json()
        assert limits["durability"] == "fsync"
        assert limits["max_body_bytes"] == MAX_BODY_BYTES
        assert "max_bytes" not in (await client.get("/v1/jobs/none")).json()
        assert (await client.get("/v1/version")).json()["api"] == "v1"
        text = (await client.get("/metrics")).text
        assert 'penstock_http_requests_total{code="200",method="GET",route="/v1/limits"}' in text
        assert "penstock_http_request_duration_seconds_bucket" in text


@pytest.mark.long
async def test_the_bounds_that_a_client_can_reach_are_shown(connect: Any) -> None:
    """Each bound is listed by name; ``test_bounds`` checks that the server enforces it."""
    own = {
        "http_connections": 100, "http_connections_per_address": 50, "http_head_bytes": 2048, "http_head_s": 3.0,
        "http_body_s": 4.0, "key_concurrency": 7, "key_large_bodies": 2, "large_bodies": 5, "tenant_share": 0.5,
        "max_files": 6, "files_bytes": 2 << 20,
    }  # fmt: skip
    async with connect(**own, token_rate_limit="9/hour") as client:
        limits = (await client.get("/v1/limits")).json()
        document = (await client.get("/openapi.json")).json()["components"]["schemas"]
    found = {**limits, **limits["connections"], **limits["per_key"]}
    names = (
        "max_connections", "max_per_address", "max_head_bytes", "head_s", "body_s", "max_requests_at_once",
        "max_large_bodies", "max_large_bodies_of_all", "tenant_share", "max_files", "files_bytes",
    )  # fmt: skip
    assert [found[name] for name in names] == list(own.values())
    assert limits["token_rate_limit"] == "9/hour"
    for shown, schema in (
        (limits, "Limits"), (limits["connections"], "ConnectionLimits"), (limits["per_key"], "KeyLimits"),
        (limits["documents"], "DocumentLimits"), (limits["feedback"], "FeedbackLimits"),
    ):  # fmt: skip
        assert document[schema]["properties"].keys() <= shown.keys(), "the document names them, and nothing is missing"


async def test_every_operation_documents_its_problems(connect: Any) -> None:
    async with connect() as client:
        document = (await client.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "application/problem+json" in operation["responses"]["422"]["content"], (path, method)
            assert operation["description"], (path, method)
    submit = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    assert set(submit) == {"application/json", "application/yaml"}
