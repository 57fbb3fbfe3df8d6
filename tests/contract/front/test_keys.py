"""API keys: scopes, expiry, revocation, and the commands and client methods for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.routing import APIRoute
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.services.coordinator import auth
from penstock.services.coordinator.api.app import ROUTERS
from penstock.services.coordinator.api.guard import OPEN_PATHS
from penstock.services.coordinator.api.scopes import scope_of
from penstock.shared.errors import ConfigError, NotFound
from penstock.shared.protocol.keys import SCOPES, key_id, new_key

ADMIN = {"authorization": "Bearer root"}
FREE = {*OPEN_PATHS, "/v1/limits"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def create_key(client: Any, *scopes: str, **more: Any) -> tuple[str, dict[str, str]]:
    reply = await client.post("/v1/keys", json={"name": "k", "scopes": list(scopes), **more}, headers=ADMIN)
    assert reply.status_code == 201, reply.text
    return reply.json()["id"], bearer(reply.json()["key"])


def test_every_route_names_the_scope_that_it_needs() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert len(routes) > 20
    without = {route.path for route in routes if scope_of(route) is None}
    assert without == FREE - {"/openapi.json"}


async def test_a_key_may_do_what_its_scopes_allow_and_nothing_else(connect: Any, job: Any) -> None:
    async with connect(api_keys="root") as client:
        _, reader = await create_key(client, "jobs:read")
        _, writer = await create_key(client, "jobs:write")
        _, admin = await create_key(client, "admin")
        assert (await client.get("/v1/jobs", headers=reader)).status_code == 200
        refused = await client.post("/v1/jobs", json=job, headers=reader)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")
        assert "'jobs:write'" in refused.json()["detail"]
        assert "has: jobs:read" in refused.json()["detail"]
        assert (await client.get("/v1/jobs", headers=writer)).status_code == 403
        id = (await client.post("/v1/jobs", json=job, headers=writer)).json()["id"]
        assert (await client.get(f"/v1/jobs/{id}/metrics", headers=reader)).status_code == 403
        assert (await client.get(f"/v1/jobs/{id}/metrics", headers=admin)).status_code == 200
        assert (await client.get("/v1/keys", headers=reader)).status_code == 403
        assert (await client.get("/v1/limits", headers=reader)).status_code == 200


async def test_the_secret_is_shown_once_and_stored_nowhere(connect: Any, deployment: Any) -> None:
    async with connect(api_keys="root") as client:
        reply = await client.post("/v1/keys", json={"name": "k", "scopes": ["admin", "admin"]}, headers=ADMIN)
        body = reply.json()
        text = body["key"]
        assert reply.headers["location"] == f"/v1/keys/{body['id']}"
        assert body["scopes"] == ["admin"]
        shown = await client.get(f"/v1/keys/{body['id']}", headers=ADMIN)
        assert shown.json() == {name: value for name, value in body.items() if name not in ("key", "warnings")}
        listed = (await client.get("/v1/keys", headers=ADMIN)).text
        stored = deployment.keys[body["id"]].model_dump_json()
        assert text.partition(body["id"])[2] not in listed + stored + shown.text
        again = {"idempotency-key": "k", **ADMIN}
        first, second = [
            (await client.post("/v1/keys", json={"name": "k", "scopes": ["admin"]}, headers=again)).json()
            for _ in range(2)
        ]
        assert first["key"] != second["key"]  # a reply with a secret is not stored


async def test_revoked_expired_and_forged_keys(connect: Any, monkeypatch: Any) -> None:
    async with connect(api_keys="root") as client:
        id, key = await create_key(client, "jobs:read")
        assert (await client.get("/v1/jobs", headers=key)).status_code == 200
        assert (await client.delete(f"/v1/keys/{id}", headers=ADMIN)).status_code == 204
        gone = await client.get("/v1/jobs", headers=key)
        assert (gone.status_code, gone.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.delete(f"/v1/keys/{id}", headers=ADMIN)).status_code == 404

        soon = datetime.now(UTC) - timedelta(seconds=1)
        _, late = await create_key(client, "jobs:read", expires_at=soon.isoformat())
        assert "expired at" in (await client.get("/v1/jobs", headers=late)).json()["detail"]
        _, fresh = await create_key(client, "jobs:read", expires_in_s=3600)
        assert (await client.get("/v1/jobs", headers=fresh)).status_code == 200

        other, _ = await create_key(client, "jobs:read")
        forged = fresh["authorization"].rpartition("rlk_")[2].partition("_")[2]
        for text in (f"rlk_{other}_{forged}", "rlk_", "rlk_x_y", f"rlk_{'0' * 16}_{forged}"):
            assert (await client.get("/v1/jobs", headers=bearer(text))).status_code == 401, text


async def test_a_revoked_key_is_not_trusted_for_long_by_other_replicas(
    connect: Any, deployment: Any, monkeypatch: Any
) -> None:
    async with connect(api_keys="root") as one, connect(api_keys="root") as two:
        id, key = await create_key(one, "jobs:read")
        assert (await two.get("/v1/jobs", headers=key)).status_code == 200
        await one.delete(f"/v1/keys/{id}", headers=ADMIN)
        clock = auth.time.monotonic() + auth.TRUST_S
        monkeypatch.setattr(auth.time, "monotonic", lambda: clock)
        assert (await two.get("/v1/jobs", headers=key)).status_code == 401


async def test_without_configured_keys_a_key_still_limits_its_holder(connect: Any, job: Any) -> None:
    async with connect() as client:
        _, reader = await create_key(client, "jobs:read")
        assert (await client.post("/v1/jobs", json=job, headers=reader)).status_code == 403
        assert (await client.post("/v1/jobs", json=job)).status_code == 202
        assert (await client.post("/v1/jobs", json=job, headers=bearer("sk-whatever"))).status_code == 202
        assert (await client.get("/v1/jobs", headers=bearer("rlk_not-a-key"))).status_code == 401


async def test_a_configured_key_may_look_like_a_stored_one(connect: Any) -> None:
    async with connect(api_keys="rlk_ours") as client:
        assert (await client.get("/v1/keys", headers=bearer("rlk_ours"))).status_code == 200
        assert (await client.get("/v1/keys", headers=bearer("rlk_theirs"))).status_code == 401


async def test_a_key_may_have_its_own_rate(connect: Any) -> None:
    async with connect(api_keys="root", rate_limit="100/minute") as client:
        _, slow = await create_key(client, "jobs:read", rate_limit="2/minute")
        codes = [(await client.get("/v1/jobs", headers=slow)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        assert (await client.get("/v1/jobs", headers=ADMIN)).status_code == 200


BAD_KEYS = [
    ({"scopes": ["jobs:reed"]}, "/scopes/0"),
    ({"scopes": []}, "/scopes"),
    ({"name": ""}, "/name"),
    ({"rate_limit": "often"}, "/rate_limit"),
    ({"expires_in_s": 0}, "/expires_in_s"),
    ({"expires_in_s": "60"}, "/expires_in_s"),
    ({"expires_in_s": 5, "expires_at": "2099-01-01T00:00:00Z"}, ""),
    ({"expires_at": "2099-01-01T00:00:00"}, "/expires_at"),
    ({"scope": "admin"}, "/scope"),
]


async def test_bad_keys_are_refused_with_a_pointer(connect: Any) -> None:
    async with connect() as client:
        for flaw, pointer in BAD_KEYS:
            reply = await client.post("/v1/keys", json={"name": "k", "scopes": ["admin"], **flaw})
            assert reply.status_code == 422, flaw
            assert [error["pointer"] for error in reply.json()["errors"]] == [pointer], flaw


def test_ids_and_digests() -> None:
    id, text, digest = new_key()
    assert key_id(text) == id
    assert (key_id("sk-1"), key_id("rlk_bad"), key_id("")) == (None, "", None)
    assert text not in digest
    assert "admin" in SCOPES


def test_the_command_line_creates_lists_and_revokes(served: Any) -> None:
    env = {"PENSTOCK_URL": served.url}

    def run(*words: str) -> str:
        result = CliRunner().invoke(cli, ["keys", *words], env=env)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    text = run("create", "agent", "--scopes", "inference:write,feedback:write", "--expires", "30d")
    id = key_id(text)
    assert id
    assert "agent" in run("ls")
    assert text not in run("ls")
    run("revoke", id)
    assert id not in run("ls")
    bad = CliRunner().invoke(cli, ["keys", "create", "x", "--scopes", "all"], env=env)
    assert bad.exit_code == 2
    assert "jobs:read" in bad.output
    assert CliRunner().invoke(cli, ["keys", "create", "x", "--scopes", "admin", "--expires", "soon"]).exit_code == 2


async def test_both_clients(served: Any) -> None:
    with Client(served.url) as client:
        created = client.keys.create("one", ["jobs:read"], expires_in_s=60)
        assert [key.id for key in client.keys.list()] == [created.id]
        assert client.keys.show(created.id).name == "one"
        with Client(served.url, api_key=created.key) as limited:
            assert limited.list() == []
            with pytest.raises(ConfigError, match="lacks the scope 'admin'"):
                limited.keys.list()
    async with AsyncClient(served.url) as client:
        other = await client.keys.create("two", ["admin"])
        assert len(await client.keys.list()) == 2
        await client.keys.revoke(other.id)
        with pytest.raises(NotFound):
            await client.keys.show(other.id)
        with pytest.raises(NotFound):
            await client.keys.revoke(other.id)
