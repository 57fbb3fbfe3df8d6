"""The limit of feedback items per end user of a key: the API refuses only the user who exceeds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio


def verdict(live: Any, **more: Any) -> dict[str, Any]:
    return {"inference_id": live.new_id(), "metric_name": "accepted", "value": True, **more}


def limited(reply: httpx.Response) -> dict[str, Any]:
    """Check that the limit per user refused a request; return the error."""
    body: dict[str, Any] = reply.json()
    assert (reply.status_code, body["error"]["code"]) == (429, "user_rate_limited"), body
    assert body["error"]["type"] == "rate_limit_error"
    assert reply.headers["content-type"] == "application/problem+json"
    wait_s = int(reply.headers["retry-after"])
    assert 1 <= wait_s <= 3600
    assert reply.headers["retry-after-ms"] == str(1000 * wait_s)
    return body


async def test_two_users_of_one_key(open_live: Any) -> None:
    async with open_live(user_rate_limit="2/hour") as live:
        for _ in range(2):
            await live.accept(user="ann")
        reply = await live.post(verdict(live, user="ann"))
        assert "more than 2 requests of this user in 3600 s" in limited(reply)["detail"]
        assert reply.headers["ratelimit-policy"] == '"user";q=2;w=3600'
        limited(await live.post(verdict(live, tags={"user_id": "ann"})))
        await live.accept(user="ben")
        await live.accept(tags={"user_id": "ben"})
        limited(await live.post(verdict(live, user="ben")))
        for _ in range(3):
            await live.accept()  # names no user
        assert len(await live.items()) == 7, "what was refused is not stored"


async def test_invalid_items_are_not_counted(open_live: Any) -> None:
    async with open_live(user_rate_limit="1/hour") as live:
        assert (await live.post(verdict(live, user="ann", weight=7.0))).status_code == 422
        await live.accept(user="ann")


async def test_users_of_two_keys(open_live: Any) -> None:
    async with open_live(user_rate_limit="1/hour", api_keys="one,two") as live:
        for key in ("one", "two"):
            bearer = {"authorization": f"Bearer {key}"}
            assert (await live.post(verdict(live, user="ann"), **bearer)).status_code == 202
            limited(await live.post(verdict(live, user="ann"), **bearer))


async def test_only_rows_of_that_user_are_refused(open_live: Any) -> None:
    async with open_live(user_rate_limit="2/hour") as live:
        await live.accept(user="ann")
        users = ["ann", "ben", "ann", "", "ben", "ann"]
        rows = [verdict(live, **({"user": user} if user else {})) for user in users]
        rows.insert(1, {"inference_id": "nothing"})
        reply = await live.client.post("/v1/feedback/batch", json=rows)
        assert reply.status_code == 207
        data = reply.json()["data"]
        assert [row["status"] for row in data] == [202, 422, 202, 429, 202, 202, 429]
        assert [row["index"] for row in data] == list(range(7))
        problem = data[3]["problem"]
        assert (problem["status"], problem["error"]["code"]) == (429, "user_rate_limited")
        assert len(await live.items()) == 5


async def test_a_batch_of_refused_rows_is_refused(open_live: Any) -> None:
    async with open_live(user_rate_limit="1/hour") as live:
        await live.accept(user="ann")
        limited(await live.client.post("/v1/feedback/batch", json=[verdict(live, user="ann") for _ in range(3)]))


async def test_a_refused_row_keeps_its_position(open_live: Any, tmp_path: Path) -> None:
    """Ids of rows come from the Idempotency-Key and the position, so a retry marks the rows stored before."""
    async with open_live(user_rate_limit="1/hour") as live, open_live(tmp_path / "other") as other:
        rows = [verdict(live, user=user) for user in ("ann", "ann", "ben")]
        first = await live.client.post("/v1/feedback/batch", json=rows, headers={"idempotency-key": "k"})
        assert [row["status"] for row in first.json()["data"]] == [202, 429, 202]
        await other.service.index.reach((await other.bus.last("FEEDBACK", "feedback.>")).seq, 30)
        again = await other.client.post("/v1/feedback/batch", json=rows, headers={"idempotency-key": "k"})
        data = again.json()["data"]
        assert [(row["status"], row["duplicate"]) for row in data] == [(202, True), (202, False), (202, True)]
        assert len(await live.items()) == 3


async def test_a_refusal_is_not_repeated_for_an_idempotency_key(open_live: Any) -> None:
    async with open_live(user_rate_limit="1/hour") as live:
        await live.accept(user="ann")
        late = verdict(live, user="ann")
        for _ in range(2):
            reply = await live.post(late, idempotency_key="k")
            limited(reply)
            assert "idempotent-replayed" not in reply.headers


async def test_users_named_with_a_feedback_token_are_counted_apart(open_live: Any) -> None:
    async with open_live(user_rate_limit="1/hour") as live:
        target = live.new_id()
        asked = {"inference_id": target, "metric_name": "accepted"}
        token = (await live.client.post("/v1/feedback/tokens", json=asked)).json()["token"]
        bearer = {"authorization": f"Bearer {token}"}
        assert (await live.post({**asked, "value": True, "user": "ann"}, **bearer)).status_code == 202
        limited(await live.post({**asked, "value": True, "user": "ann"}, **bearer))
        await live.accept(user="ann")


@pytest.mark.parametrize("name", ["ann@example.com"])
async def test_users_are_shared_over_valkey_by_pseudonym(
    open_live: Any, tmp_path: Path, valkey: Any, name: str
) -> None:
    shared = {"user_rate_limit": "2/hour", "redis_url": valkey.url}
    async with open_live(**shared) as one, open_live(tmp_path / "other", **shared) as two:
        await one.accept(user=name)
        await two.accept(user=name)
        for live in (one, two):
            limited(await live.post(verdict(live, user=name)))
        async with redis.asyncio.Redis.from_url(valkey.url) as store:
            keys = [key.decode() for key in await store.keys("*")]
        assert any(f"/user/local/{one.service.pseudonyms.of(name)}/" in key for key in keys), keys
        assert not any("ann" in key for key in keys)
        valkey.kill()
        await one.accept(user=name)
        await one.accept(user=name)
        limited(await one.post(verdict(one, user=name)))
