"""Feedback tokens, with which a web page lets a visitor post one verdict; each is valid once."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.services.coordinator import auth
from penstock.shared.protocol.live.feedback_tokens import TOKENS
from penstock.shared.protocol.live.interaction import bare_id

ADMIN = {"authorization": "Bearer root"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def code(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


async def create(live: Any, key: dict[str, str] = ADMIN, **about: Any) -> dict[str, Any]:
    body = {"metric_name": "accepted", **about}
    if not {"inference_id", "episode_id"} & about.keys():
        body["inference_id"] = f"chatcmpl-{live.new_id()}"
    reply = await live.client.post("/v1/feedback/tokens", json=body, headers=key)
    assert reply.status_code == 201, reply.text
    assert reply.headers["cache-control"] == "no-store"
    return {**body, **reply.json()}


async def post(live: Any, token: dict[str, Any], value: Any = True, *, path: str = "/v1/feedback", **more: Any) -> Any:
    about = {name: token[name] for name in ("metric_name", "inference_id", "episode_id") if name in token}
    body = {**about, "value": value, **more}
    return await live.client.post(path, json=body, headers=bearer(token["token"]))


async def test_a_token_is_good_for_one_verdict(open_live: Any, tmp_path: Path) -> None:
    async with open_live(api_keys="root") as live:
        token = await create(live)
        tried = await post(live, token, dryrun=True)
        assert (tried.status_code, tried.json()["status"]) == (200, "valid"), "a dry run does not use the token"
        first = await post(live, token, comment="helped", feedback_id=live.new_id())
        assert (first.status_code, first.json()["feedback_id"]) == (202, token["feedback_id"])
        for again in (await post(live, token, comment="helped"), await post(live, token, False)):
            assert code(again) == (409, "token_used")
            assert again.headers["x-should-retry"] == "false"
        (item,) = await live.items()
        assert (item.inference, item.metric, item.value) == (bare_id(token["inference_id"]), "accepted", True)
        by_key = await live.post({"inference_id": live.new_id(), "metric_name": "accepted", "value": True}, **ADMIN)
        assert by_key.status_code == 202
        assert (await live.items())[1].key_id == item.key_id, "it counts as the key that created it"

        contested = await create(live, episode_id=f"ep_{live.new_id()}", metric_name="solved")
        replies = await asyncio.gather(*(post(live, contested, n % 2 == 0, path="/feedback") for n in range(20)))
        assert Counter(reply.status_code for reply in replies) == {202: 1, 409: 19}
        assert len(await live.items()) == 3
    async with open_live(data_dir=tmp_path / "elsewhere", api_keys="root") as live:
        assert code(await post(live, token, False)) == (409, "token_used"), "at any coordinator, whenever"


async def test_a_repeated_request_gets_its_reply_again(open_live: Any) -> None:
    async with open_live(api_keys="root") as live:
        token, body = await create(live), {"metric_name": "accepted", "value": True}
        headers = {**bearer(token["token"]), "idempotency-key": "k"}
        body["inference_id"] = token["inference_id"]
        replies = [await live.client.post("/v1/feedback", json=body, headers=headers) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [202, 202]
        assert replies[1].headers["idempotent-replayed"] == "true"
        other = {**bearer((await create(live))["token"]), "idempotency-key": "k"}
        refused = await live.client.post("/v1/feedback", json=body, headers=other)
        assert code(refused) == (403, "other_verdict"), "the key of a request is one of its token"
        assert len(await live.items()) == 1


async def test_a_token_allows_nothing_else(open_live: Any) -> None:
    async with open_live(api_keys="root") as live:
        token, other = await create(live), live.new_id()
        for reply in (
            await post(live, {**token, "inference_id": other}),
            await post(live, {**token, "metric_name": "score"}, 0.5),
            await post(live, token, final=True),
            await post(live, token, revision=1),
            await post(live, token, weight=0.5),
            await live.client.post(
                "/v1/feedback",
                json={"kind": "preference", "chosen": token["inference_id"], "rejected": other},
                headers=bearer(token["token"]),
            ),
        ):
            assert code(reply) == (403, "other_verdict")
        for method, path in (
            ("POST", "/v1/feedback/batch"),
            ("POST", "/v1/feedback/tokens"),
            ("GET", f"/v1/feedback/{token['feedback_id']}"),
            ("GET", "/v1/jobs"),
            ("POST", "/v1/chat/completions"),
        ):
            reply = await live.client.request(method, path, headers=bearer(token["token"]), json={})
            assert code(reply) == (403, "feedback_token"), path
        assert await live.items() == []
        assert (await post(live, token)).status_code == 202, "the token still allows its own verdict"


async def test_expired_forged_and_orphaned_tokens_are_refused(open_live: Any, monkeypatch: Any) -> None:
    async with open_live(api_keys="root") as live:
        token = await create(live)
        secret = (await live.bus.kv("privacy").get("episode-keys")).value
        grant = TOKENS.read(token["token"], secret)
        assert grant is not None
        late = type(grant)(grant.id, grant.target, False, grant.metric, grant.maker, int(time.time()) - 1)
        body, _, signature = token["token"].partition(".")
        for text in (
            TOKENS.write(late, secret),
            TOKENS.write(grant, b"another secret"),
            f"{body[:-2]}xx.{signature}",
            token["token"].replace("rlt_", "rle_"),
            "rlt_",
        ):
            reply = await post(live, {**token, "token": text})
            assert code(reply) == (401, "invalid_api_key"), text
        maker = {"name": "page", "scopes": ["feedback:write"]}
        key = (await live.client.post("/v1/keys", json=maker, headers=ADMIN)).json()
        orphan = await create(live, bearer(key["key"]))
        monkeypatch.setattr(auth, "TRUST_S", 0.0)
        await live.client.delete(f"/v1/keys/{key['id']}", headers=ADMIN)
        assert code(await post(live, orphan)) == (401, "invalid_api_key"), "it ends with the key that created it"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"metric_name": "accepted"}, ""),
        ({"metric_name": "accepted", "inference_id": "7"}, "/inference_id"),
        ({"metric_name": "accepted", "episode_id": "ep_x"}, "/episode_id"),
        ({"metric_name": "", "inference_id": "0192f0c4-0000-7000-8000-000000000000"}, "/metric_name"),
        (
            {"metric_name": "a", "inference_id": "0192f0c4-0000-7000-8000-000000000000", "expires_in_s": 0},
            "/expires_in_s",
        ),
    ],
)
async def test_bad_requests_point_at_the_field(live: Any, body: dict[str, Any], pointer: str) -> None:
    reply = await live.client.post("/v1/feedback/tokens", json=body)
    assert code(reply) == (422, "invalid_body")
    assert reply.json()["errors"][0]["pointer"] == pointer


async def test_clients_and_the_command_line(live: Any, url: str, monkeypatch: Any) -> None:
    target = live.new_id()

    def blocking() -> None:
        with Client(url) as client:
            token = client.feedback_tokens.create("accepted", inference=target, expires_in_s=60)
        with Client(url, api_key=token.token) as page:
            assert page.feedback("accepted", True, inference=target).feedback_id == token.feedback_id

    await asyncio.to_thread(blocking)
    async with AsyncClient(url) as client:
        token = await client.feedback_tokens.create("solved", episode=f"ep_{target}")
        assert token.url == f"{url}/v1/feedback"
    monkeypatch.setenv("PENSTOCK_URL", url)
    shown = await asyncio.to_thread(
        CliRunner().invoke, cli, ["feedback", "token", target, "accepted", "--expires", "90m", "--json"]
    )
    assert json.loads(shown.stdout)["token"].startswith("rlt_")
    text = await asyncio.to_thread(
        CliRunner().invoke, cli, ["feedback", "token", target, "accepted", "--expires", "9x"]
    )
    assert text.exit_code == 2
