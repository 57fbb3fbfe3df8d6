"""Webhooks over HTTP, in both clients and on the command line."""

from __future__ import annotations

import ast
import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.services import coordinator
from penstock.services.coordinator.webhooks.store import WebhookStore
from penstock.shared.errors import ConfigError, NotFound, Unavailable
from penstock.shared.protocol.cloudevents import EVENT_TYPES, cloud_event
from penstock.shared.protocol.webhooks import DEFAULT_TYPES, DeliveryState
from penstock.shared.transport import address
from penstock.shared.transport.address import check_url, reachable_address


async def test_a_webhook_is_created_shown_changed_tried_and_deleted(connect: Any, deployment: Any, job: Any) -> None:
    async with connect(webhook_private=True) as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        reply = await client.post("/v1/webhooks", json={"url": "https://e.example/x", "types": ["rl.*"], "job": id})
        hook = reply.json()
        assert (reply.status_code, reply.headers["cache-control"]) == (201, "no-store")
        assert hook["secret"].startswith("whsec_")
        delivered = DeliveryState(sequence=7, delivered=2)
        deployment.run(WebhookStore(deployment.bus, private=True).save(hook["id"], delivered))
        shown = (await client.get(f"/v1/webhooks/{hook['id']}")).json()
        assert "secret" not in shown
        assert (shown["job"], shown["deliveries"]["delivered"]) == (id, 2)
        listed = (await client.get("/v1/webhooks")).json()["data"]
        assert [(row["id"], "secret" in row) for row in listed] == [(hook["id"], False)]
        changed = await client.patch(f"/v1/webhooks/{hook['id']}", json={"enabled": False, "url": "http://127.0.0.1:1"})
        assert (changed.json()["enabled"], changed.json()["types"]) == (False, ["rl.*"])
        tried = (await client.post(f"/v1/webhooks/{hook['id']}/test")).json()
        assert (tried["delivered"], "did not answer" in tried["error"]) == (False, True)
        assert (await client.delete(f"/v1/webhooks/{hook['id']}")).status_code == 204
        for call in (client.get, client.delete):
            assert (await call(f"/v1/webhooks/{hook['id']}")).status_code == 404
        default = (await client.post("/v1/webhooks", json={"url": "https://e.example"})).json()
        assert default["types"] == list(DEFAULT_TYPES)


async def test_a_retry_after_a_lost_reply_creates_no_second_webhook(connect: Any) -> None:
    async with connect() as client:
        key, body = {"Idempotency-Key": "k1"}, {"url": "https://e.example", "types": ["rl.*"]}
        first, again = [(await client.post("/v1/webhooks", json=body, headers=key)).json() for _ in range(2)]
        assert first == again
        assert len((await client.get("/v1/webhooks")).json()["data"]) == 1
        other = await client.post("/v1/webhooks", json={**body, "types": ["rl.job.*"]}, headers=key)
        assert other.status_code == 422
        assert other.json()["type"].endswith("idempotency_key_reused")


BAD = [
    ({"url": "http://127.0.0.1/x"}, "/url"),
    ({"url": "https://e.example", "types": []}, "/types"),
    ({"url": "ftp://e.example"}, "/url"),
    ({"url": "http://10.0.0.1/x"}, "/url"),
    ({"url": "https://e.example", "types": ["RL!"]}, "/types/0"),
    ({"url": "https://e.example", "types": ["rl.*", "rl.job.done.v1"]}, "/types/1"),
    ({"url": "https://e.example", "types": ["rl.jobs.*"]}, "/types/0"),
    ({"url": "https://e.example", "job": "job_1"}, "/job"),
    ({"types": ["rl.*"]}, "/url"),
    ({"url": "https://e.example", "secret": "x"}, "/secret"),
]


async def test_bad_webhooks(connect: Any) -> None:
    async with connect() as client:
        for body, pointer in BAD:
            reply = await client.post("/v1/webhooks", json=body)
            assert (reply.status_code, reply.json()["errors"][0]["pointer"]) == (422, pointer), body
        detail = (
            await client.post("/v1/webhooks", json={"url": "https://e.example", "types": ["rl.job.fail.v1"]})
        ).json()
        assert "did you mean 'rl.job.failed.v1'? there are: rl.job.pending.v1, " in detail["errors"][0]["detail"]
        hook = (
            await client.post("/v1/webhooks", json={"url": "https://e.example", "types": list(EVENT_TYPES[:32])})
        ).json()
        assert (await client.patch(f"/v1/webhooks/{hook['id']}", json={"types": ["rl.x.v1"]})).status_code == 422


def test_every_published_event_has_a_known_type() -> None:
    """The coordinator's code names types in calls of ``event`` and in rows that it publishes itself.

    ``reset`` is a signal of an event stream, not an event.
    """
    found = {"worker_lost", "worker_back"}  # PresenceChange.type
    for path in Path(coordinator.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            kind: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                kind = node.args[1] if len(node.args) == 3 else None
            elif isinstance(node, ast.Dict):
                row = {
                    key.value: value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant)
                }
                kind = row.get("type") if "level" in row else None
            if isinstance(kind, ast.Constant):
                found.add(str(kind.value))
    assert {"asked", "checkpoint", "dropped", "evaluation", "phase", "submitted"} <= found
    types = {cloud_event("job_1", 1, {"time": 0.0, "type": name, "message": ""})["type"] for name in found - {"reset"}}
    assert types <= set(EVENT_TYPES)


@pytest.mark.parametrize(
    "url",
    ["ftp://e.example", "https://", "e.example", "https://u:p@e.example", "https://e.example#x", "http://e.example:99999",
     "http://127.0.0.1", "http://[::1]:80", "http://10.0.0.1", "http://169.254.169.254/latest", "http://[::ffff:10.0.0.1]",
     "http://0.0.0.0", "http://[fe80::1]", "http://100.64.0.1", "http://224.0.0.1", "http://[64:ff9b::7f00:1]",
     "http://[64:ff9b:1::1]", "http://[fec0::1]", "http://[::7f00:1]", "http://[::ffff:0:7f00:1]", "http://[2002:7f00:1::]",
     "http://xn--ä.example"],
)  # fmt: skip
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        check_url(url, private=False)


async def test_addresses_are_checked_when_they_are_known() -> None:
    assert check_url("http://127.0.0.1:8000/x", private=True)
    assert check_url("https://93.184.216.34/x?y=1", private=False)
    for public in ("https://[2606:2800:220:1::1]", "https://[64:ff9b::5db8:d822]", "http://exämple.com/"):
        assert check_url(public, private=False)
    with pytest.raises(Unavailable, match="private address"):
        await reachable_address("localhost", 80, private=False)
    assert await reachable_address("127.0.0.1", 80, private=True) == "127.0.0.1"


async def test_a_slow_name_server_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> list[Any]:
        asked.set()
        answered.wait(60)
        return [(None, None, 0, "", ("93.184.216.34", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(address, "RESOLVE_S", 60.0)
    with ThreadPoolExecutor(1) as others:
        asyncio.get_running_loop().set_default_executor(others)
        found = asyncio.create_task(reachable_address("e.example", 80, private=False))
        try:
            async with asyncio.timeout(30):
                while not asked.is_set():
                    await asyncio.sleep(0.001)
            assert await asyncio.wait_for(asyncio.to_thread(answered.is_set), 20) is False
        finally:
            answered.set()
        assert await found == "93.184.216.34"


async def test_both_clients_and_the_command_line(serve: Any, web: Any) -> None:
    served = serve(webhook_private=True)
    with Client(served.url) as client:
        created = client.webhooks.create(web.url, types=["rl.job.*"])
        assert client.webhooks.show(created.id).url == web.url
        assert client.webhooks.test(created.id).delivered
        assert not client.webhooks.change(created.id, enabled=False).enabled
    async with AsyncClient(served.url) as client:
        assert [row.id for row in await client.webhooks.list()] == [created.id]
        await client.webhooks.delete(created.id)
        with pytest.raises(NotFound):
            await client.webhooks.show(created.id)

    def run(*words: str) -> Any:
        return CliRunner().invoke(cli, ["webhooks", *words], env={"PENSTOCK_URL": served.url})

    assert run("create", "http://127.0.0.1:1", "--types", "rl.job.*, rl.checkpoint.created.v1").stdout.startswith(
        "whsec_"
    )
    (id,) = [word for word in run("ls").stdout.split() if word.startswith("wh_")]
    assert run("test", id).exit_code == 1
    assert run("disable", id).exit_code == 0
    assert "off: by" in run("ls").stdout
    assert '"enabled": false' in run("show", id).stdout
    assert run("enable", id).exit_code == 0
    assert run("rm", id).exit_code == 0
    assert run("show", id).exit_code == 1
