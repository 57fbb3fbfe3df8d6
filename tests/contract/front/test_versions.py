"""Overriding the promotion gate and going back to a checkpoint: routes, scopes, clients, commands."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.client.results import Trial, Versions
from penstock.shared.errors import Conflict, DeadlineError


@pytest.mark.parametrize(
    ("verb", "bodies"),
    [
        ("promote", ({"version": 3}, {"version": "3"})),
        ("rollback", ({"checkpoint": 2}, {"checkpoint": -1})),
    ],
)
async def test_each_is_an_operation(
    connect: Any, deployment: Any, job: Any, verb: str, bodies: tuple[dict[str, int], dict[str, Any]]
) -> None:
    body, wrong = bodies
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        reply = await client.post(f"/v1/jobs/{id}/{verb}", json=body)
        assert (reply.status_code, reply.json()["kind"], reply.json()["args"]) == (202, verb, body)
        assert reply.headers["location"] == f"/v1/jobs/{id}/operations/{reply.json()['id']}"
        assert deployment.jobs[id].operations[-1].kind == verb
        for bad in ({}, wrong, {**body, "more": 1}):
            assert (await client.post(f"/v1/jobs/{id}/{verb}", json=bad)).status_code == 422
        deployment.advance(id, "succeeded")
        assert (await client.post(f"/v1/jobs/{id}/{verb}", json=body)).status_code == 409
        assert (await client.post(f"/v1/jobs/job_{'0' * 32}/{verb}", json=body)).status_code == 404


async def test_the_gate_is_overridden_by_administrators_only(connect: Any, deployment: Any, job: Any) -> None:
    async with connect(api_keys="root") as client:
        client.headers["authorization"] = "Bearer root"
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        key = (await client.post("/v1/keys", json={"name": "k", "scopes": ["jobs:write"]})).json()["key"]
        client.headers["authorization"] = f"Bearer {key}"
        refused = await client.post(f"/v1/jobs/{id}/promote", json={"version": 1})
        assert (refused.status_code, "'admin'" in refused.text) == (403, True)
        assert (await client.post(f"/v1/jobs/{id}/rollback", json={"checkpoint": 0})).status_code == 202


async def test_the_version_on_trial_is_shown_to_people_and_clients(served: Any, deployment: Any, job: Any) -> None:
    trial = {
        "version": 5, "served_version": 4, "share": 0.1, "since": 1.0, "until": 61.0, "needed": 20, "conversations": 7,
        "reward": 0.5, "served_conversations": 40, "served_reward": None,
    }  # fmt: skip
    env = {"PENSTOCK_URL": served.url}
    with Client(served.url) as client:
        id = client.submit(job).id
        deployment.advance(id, "running", policy_version=3)
        assert client.versions.show(id) == Versions(newest=3, served=3)
        deployment.advance(id, "running", policy_version=5, served_version=4, canary=trial)
    async with AsyncClient(served.url) as aclient:
        shown = await aclient.versions.show(id)
    assert shown == Versions(newest=5, served=4, canary=Trial(**trial))
    shown = CliRunner().invoke(cli, ["get", id], env={**env, "COLUMNS": "200"})
    assert "5 answers 10% (7 judged, reward 0.5" in shown.output


async def test_clients_and_commands_wait_for_the_ledger(served: Any, deployment: Any, job: Any) -> None:
    env = {"PENSTOCK_URL": served.url}
    with Client(served.url) as client:
        id = client.submit(job).id
        with pytest.raises(DeadlineError, match="not back at checkpoint 0 within 0 s"):
            client.versions.roll_back(id, 0, timeout_s=0)
        deployment.finish(id, state="succeeded", result={"version": 9})
        assert client.versions.roll_back(id, 0) == {"version": 9}
        deployment.advance(id, "running", policy_version=9)
    promoted = CliRunner().invoke(cli, ["ckpt", "promote", id], env=env)
    assert (promoted.exit_code, f"version 9 of {id} is served" in promoted.output) == (0, True)
    assert deployment.jobs[id].operations[-1].args == {"version": 9}
    deployment.finish(id, state="failed", message="only the newest version can be promoted")
    async with AsyncClient(served.url) as aclient:
        with pytest.raises(Conflict, match="only the newest"):
            await aclient.versions.promote(id, 3)
    assert CliRunner().invoke(cli, ["ckpt", "promote", id, "3"], env=env).exit_code == 1
