"""Items of feedback per end user of a key: who floods is refused, alone, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio


def verdict(desk: Any, **more: Any) -> dict[str, Any]:
    return {"inference_id": desk.new_id(), "metric_name": "accepted", "value": True, **more}


def over(reply: httpx.Response) -> dict[str, Any]:
    """Error of a refused request."""
    body: dict[str, Any] = reply.json()
    assert (reply.status_code, body["error"]["code"]) == (429, "user_rate_limited"), body
    assert body["error"]["type"] == "rate_limit_error"
    assert reply.headers["content-type"] == "application/problem+json"
    wait_s = int(reply.headers["retry-after"])
    assert 1 <= wait_s <= 3600
    assert reply.headers["retry-after-ms"] == str(1000 * wait_s)
    return body


async def test_two_users_of_one_key(open_desk: Any) -> None:
    async with open_desk(user_rate_limit="2/hour") as desk:
        for _ in range(2):
            await desk.accept(user="ann")
        reply = await desk.post(verdict(desk, user="ann"))
        assert "more than 2 requests of this user in 3600 s" in over(reply)["detail"]
        assert reply.headers["ratelimit-policy"] == '"user";q=2;w=3600'
        over(await desk.post(verdict(desk, tags={"user_id": "ann"})))
        await desk.accept(user="ben")
        await desk.accept(tags={"user_id": "ben"})
        over(await desk.post(verdict(desk, user="ben")))
        for _ in range(3):
            await desk.accept()  # names nobody
        assert len(await desk.items()) == 7, "what was refused is not stored"


async def test_what_is_no_item_is_not_counted(open_desk: Any) -> None:
    async with open_desk(user_rate_limit="1/hour") as desk:
        assert (await desk.post(verdict(desk, user="ann", weight=7.0))).status_code == 422
        await desk.accept(user="ann")


async def test_users_of_two_keys(open_desk: Any) -> None:
    async with open_desk(user_rate_limit="1/hour", api_keys="one,two") as desk:
        for key in ("one", "two"):
            bearer = {"authorization": f"Bearer {key}"}
            assert (await desk.post(verdict(desk, user="ann"), **bearer)).status_code == 202
            over(await desk.post(verdict(desk, user="ann"), **bearer))


async def test_only_rows_of_that_user_are_refused(open_desk: Any) -> None:
    async with open_desk(user_rate_limit="2/hour") as desk:
        await desk.accept(user="ann")
        users = ["ann", "ben", "ann", "", "ben", "ann"]
        rows = [verdict(desk, **({"user": user} if user else {})) for user in users]
        rows.insert(1, {"inference_id": "nothing"})
        reply = await desk.client.post("/v1/feedback/batch", json=rows)
        assert reply.status_code == 207
        data = reply.json()["data"]
        assert [row["status"] for row in data] == [202, 422, 202, 429, 202, 202, 429]
        assert [row["index"] for row in data] == list(range(7))
        problem = data[3]["problem"]
        assert (problem["status"], problem["error"]["code"]) == (429, "user_rate_limited")
        assert len(await desk.items()) == 5


async def test_a_batch_of_refused_rows_is_refused(open_desk: Any) -> None:
    async with open_desk(user_rate_limit="1/hour") as desk:
        await desk.accept(user="ann")
        over(await desk.client.post("/v1/feedback/batch", json=[verdict(desk, user="ann") for _ in range(3)]))


async def test_a_refused_row_keeps_its_place(open_desk: Any, tmp_path: Path) -> None:
    """The ids of rows come from the Idempotency-Key and their places: a retry is told which rows it knows."""
    async with open_desk(user_rate_limit="1/hour") as desk, open_desk(tmp_path / "other") as other:
        rows = [verdict(desk, user=user) for user in ("ann", "ann", "ben")]
        first = await desk.client.post("/v1/feedback/batch", json=rows, headers={"idempotency-key": "k"})
        assert [row["status"] for row in first.json()["data"]] == [202, 429, 202]
        await other.desk.index.reach((await other.bus.last("FEEDBACK", "feedback.>")).seq, 30)
        again = await other.client.post("/v1/feedback/batch", json=rows, headers={"idempotency-key": "k"})
        data = again.json()["data"]
        assert [(row["status"], row["duplicate"]) for row in data] == [(202, True), (202, False), (202, True)]
        assert len(await desk.items()) == 3


async def test_a_refusal_is_not_repeated_for_an_idempotency_key(open_desk: Any) -> None:
    async with open_desk(user_rate_limit="1/hour") as desk:
        await desk.accept(user="ann")
        late = verdict(desk, user="ann")
        for _ in range(2):
            reply = await desk.post(late, idempotency_key="k")
            over(reply)
            assert "idempotent-replayed" not in reply.headers


async def test_whoever_may_name_anybody_uses_up_nobody_elses(open_desk: Any) -> None:
    async with open_desk(user_rate_limit="1/hour") as desk:
        target = desk.new_id()
        asked = {"inference_id": target, "metric_name": "accepted"}
        token = (await desk.client.post("/v1/feedback/tokens", json=asked)).json()["token"]
        bearer = {"authorization": f"Bearer {token}"}
        assert (await desk.post({**asked, "value": True, "user": "ann"}, **bearer)).status_code == 202
        over(await desk.post({**asked, "value": True, "user": "ann"}, **bearer))
        await desk.accept(user="ann")


@pytest.mark.parametrize("name", ["ann@example.com"])
async def test_users_are_shared_over_valkey_by_pseudonym(
    open_desk: Any, tmp_path: Path, valkey: Any, name: str
) -> None:
    shared = {"user_rate_limit": "2/hour", "redis_url": valkey.url}
    async with open_desk(**shared) as one, open_desk(tmp_path / "other", **shared) as two:
        await one.accept(user=name)
        await two.accept(user=name)
        for desk in (one, two):
            over(await desk.post(verdict(desk, user=name)))
        async with redis.asyncio.Redis.from_url(valkey.url) as store:
            keys = [key.decode() for key in await store.keys("*")]
        assert any(f"/user/local/{one.desk.pseudonyms.of(name)}/" in key for key in keys), keys
        assert not any("ann" in key for key in keys)
        valkey.kill()
        await one.accept(user=name)
        await one.accept(user=name)
        over(await one.post(verdict(one, user=name)))
