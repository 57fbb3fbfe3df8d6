"""Idempotency keys and rate limits, without Valkey and with a real Valkey that dies under load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from penstock.services.coordinator.api.http import idempotency
from penstock.services.coordinator.api.http.idempotency import ReplyStore, StoredReply
from penstock.services.coordinator.api.http.volatile import Volatile
from penstock.services.coordinator.submission import Submissions


def with_key(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


class Held:
    """Events of held submissions: ``begun`` is set when the first begins; tests set ``go_on``."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Hold all submissions until the test sets ``go_on``."""
    submit, held = Submissions.submit, Held()

    async def waiting(*given: Any, **named: Any) -> Any:
        held.begun.set()
        await held.go_on.wait()
        return await submit(*given, **named)

    monkeypatch.setattr(Submissions, "submit", waiting)
    return held


async def test_the_same_request_twice_has_one_effect(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        first = await client.post("/v1/jobs", json=job, headers=with_key('"k1"'))
        again = await client.post("/v1/jobs", json=job, headers=with_key("k1"))
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["etag"] == first.headers["etag"]
    assert deployment.submitted == 1


async def test_one_hundred_at_once_have_one_effect(connect: Any, deployment: Any, job: Any, held: Held) -> None:
    async with connect() as client:
        posts = [asyncio.create_task(client.post("/v1/jobs", json=job, headers=with_key("k"))) for _ in range(100)]
        async with asyncio.timeout(60):
            while sum(post.done() for post in posts) < 99:
                await asyncio.sleep(0.02)
        held.go_on.set()
        codes = Counter(reply.status_code for reply in await asyncio.gather(*posts))
        refused = await client.post("/v1/jobs", json=job, headers=with_key("k"))
    assert codes == {202: 1, 409: 99}
    assert refused.headers["idempotent-replayed"] == "true"
    assert deployment.submitted == 1


async def test_in_flight_may_be_retried(connect: Any, job: Any, held: Held) -> None:
    async with connect() as client:
        first = asyncio.create_task(client.post("/v1/jobs", json=job, headers=with_key("k")))
        await held.begun.wait()
        reply = await client.post("/v1/jobs", json=job, headers=with_key("k"))
        assert reply.json()["error"]["code"] == "idempotency_in_flight"
        assert (reply.headers["x-should-retry"], reply.headers["retry-after"]) == ("true", "1")
        held.go_on.set()
        assert (await first).status_code == 202


async def test_another_body_or_query_under_the_same_key(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        await client.post("/v1/jobs", json=job, headers=with_key("k"))
        other = await client.post("/v1/jobs", json={**job, "seed": 1}, headers=with_key("k"))
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        assert (await client.post("/v1/jobs?dry_run=true", json=job, headers=with_key("k"))).status_code == 422
    assert deployment.submitted == 1


@pytest.mark.long
async def test_failures_are_not_stored(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        deployment.server.kill()
        assert (await client.post("/v1/jobs", json=job, headers=with_key("k"))).status_code == 503
        deployment.server.start()
        assert (await client.post("/v1/jobs", json=job, headers=with_key("k"))).status_code == 202


@pytest.mark.parametrize("key", ["", '""', "x" * 256])
async def test_invalid_keys(connect: Any, job: Any, key: str) -> None:
    async with connect() as client:
        reply = await client.post("/v1/jobs", json=job, headers=with_key(key))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "bad_idempotency_key")


async def test_keys_of_different_callers_do_not_meet(connect: Any, deployment: Any, job: Any) -> None:
    async with connect(api_keys="a,b") as client:
        for caller in ("a", "b"):
            headers = {"authorization": f"Bearer {caller}", **with_key("k")}
            assert "idempotent-replayed" not in (await client.post("/v1/jobs", json=job, headers=headers)).headers
    assert deployment.submitted == 2


async def test_replies_and_rates_are_shared_over_valkey(connect: Any, deployment: Any, job: Any, valkey: Any) -> None:
    shared = {"redis_url": valkey.url, "rate_limit": "4/minute"}
    async with connect(**shared) as one, connect(**shared) as two:
        first = await one.post("/v1/jobs", json=job, headers=with_key("k"))
        again = await two.post("/v1/jobs", json=job, headers=with_key("k"))
        assert again.headers["idempotent-replayed"] == "true"
        assert again.content == first.content
        assert deployment.submitted == 1
        assert (await one.get("/v1/jobs")).headers["ratelimit"].startswith('"requests";r=1;')
        assert (await two.get("/v1/jobs")).headers["ratelimit"].startswith('"requests";r=0;')
        assert (await one.get("/v1/jobs")).status_code == 429


async def test_requests_in_flight_are_shared_over_valkey(
    connect: Any, deployment: Any, job: Any, valkey: Any, held: Held
) -> None:
    async with connect(redis_url=valkey.url) as one, connect(redis_url=valkey.url) as two:
        first = asyncio.create_task(one.post("/v1/jobs", json=job, headers=with_key("k")))
        await held.begun.wait()
        assert (await two.post("/v1/jobs", json=job, headers=with_key("k"))).status_code == 409
        held.go_on.set()
        await first
        assert (await two.post("/v1/jobs", json=job, headers=with_key("k"))).status_code == 202
    assert deployment.submitted == 1


@pytest.mark.long
async def test_kill_valkey_under_load(connect: Any, deployment: Any, job: Any, valkey: Any) -> None:
    """All requests succeed before, during and after the outage; retries with a key still have one effect."""
    async with connect(redis_url=valkey.url) as client:
        failures: list[Any] = []
        slowest = 0.0
        sent = 0

        async def submit_twice() -> None:
            nonlocal slowest, sent
            sent += 1
            headers = with_key(f"k{sent}")
            for _ in range(2):
                began = time.perf_counter()
                reply = await client.post("/v1/jobs", json=job, headers=headers)
                slowest = max(slowest, time.perf_counter() - began)
                if reply.status_code != 202:
                    failures.append(reply.text)

        async def load(until: float) -> None:
            while time.monotonic() < until:
                await submit_twice()

        end = time.monotonic() + 3.5
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(load(end))
            await asyncio.sleep(0.5)
            valkey.kill()
            await asyncio.sleep(1.0)
            assert "away" in (await client.get("/readyz")).json()["checks"]["redis"]["detail"]
            valkey.start()
        assert not failures
        assert deployment.submitted == sent > 20
        assert slowest < 5.0, "requests do not wait for a Valkey that is away; a machine under load is slow itself"
        await until_redis_is(client, "in use")


async def test_readiness_shows_the_state_of_valkey(connect: Any, valkey: Any) -> None:
    async with connect(redis_url=valkey.url) as client:
        await until_redis_is(client, "in use")
        valkey.kill()
        await until_redis_is(client, "away, using memory")
        valkey.start()
        await until_redis_is(client, "in use")


async def until_redis_is(client: Any, detail: str) -> None:
    async with asyncio.timeout(30):
        while (await client.get("/readyz")).json()["checks"]["redis"]["detail"] != detail:
            await asyncio.sleep(0.1)


async def test_a_valkey_that_hangs_costs_little(connect: Any, job: Any, valkey: Any) -> None:
    import signal

    async with connect(redis_url=valkey.url) as client:
        assert (await client.get("/v1/jobs")).status_code == 200
        valkey.process.send_signal(signal.SIGSTOP)
        began = time.perf_counter()
        for number in range(10):
            reply = await client.post("/v1/jobs", json=job, headers=with_key(f"k{number}"))
            assert reply.status_code == 202
        assert time.perf_counter() - began < 8


async def test_a_valkey_that_never_answered(connect: Any, job: Any) -> None:
    async with connect(redis_url="redis://127.0.0.1:1/0") as client:
        assert (await client.post("/v1/jobs", json=job, headers=with_key("k"))).status_code == 202
        assert (await client.get("/readyz")).status_code == 200


async def test_one_key_takes_no_replies_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_ENTRIES", 8)
    store = ReplyStore(Volatile(None))
    for number in range(3):
        await store.finish(f"mine {number}", StoredReply(b"f", 200), owner="victim")
    for number in range(50):
        assert await store.claim(f"theirs {number}", b"f", owner="flooder") is None
    stored = [await store.claim(f"mine {number}", b"f", owner="victim") for number in range(3)]
    assert [reply.status for reply in stored if reply is not None] == [200, 200, 200]
    monkeypatch.setattr(idempotency, "MAX_BYTES", 10_000)
    for number in range(4):
        await store.finish(f"long {number}", StoredReply(b"f", 200, body=b"a" * 4000), owner="flooder")
    stored = [await store.claim(f"mine {number}", b"f", owner="victim") for number in range(3)]
    assert all(reply is not None for reply in stored), "nor by long ones"
