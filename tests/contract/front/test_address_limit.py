"""The limit of requests per client address: it counts before a key is checked, and by an address that is not forged."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.webserver import server_of
from penstock.shared.errors import ConfigError

PATH = "/v1/jobs"


def at(client: httpx.AsyncClient, host: str) -> httpx.AsyncClient:
    """Return a client of the same application with another address."""
    app: Any = client._transport.app  # type: ignore[attr-defined]
    transport = httpx.ASGITransport(app, client=(host, 50_000), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def codes(client: httpx.AsyncClient, host: str, number: int = 1) -> list[int]:
    """Send ``number`` requests from an address; return their statuses."""
    async with at(client, host) as there:
        return [(await there.get(PATH)).status_code for _ in range(number)]


async def test_requests_with_guessed_keys_are_counted(connect: Any) -> None:
    async with connect(api_keys="root", address_rate_limit="3/hour") as client:
        for left in (2, 1, 0):
            reply = await client.get(PATH, headers={"authorization": f"Bearer guess-{left}"})
            assert reply.status_code == 401
            assert reply.headers["ratelimit-policy"] == '"address";q=3;w=3600'
            assert reply.headers["ratelimit"].startswith(f'"address";r={left};t=')
        right = {"authorization": "Bearer root"}
        reply = await client.get(PATH, headers=right)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "address_rate_limited")
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json()["error"]["type"] == "rate_limit_error"
        wait_s = int(reply.headers["retry-after"])
        assert 1 <= wait_s <= 3600
        assert reply.headers["retry-after-ms"] == str(1000 * wait_s)
        assert reply.headers["ratelimit-policy"] == '"address";q=3;w=3600'
        for path in ("/healthz", "/readyz"):
            assert (await client.get(path)).status_code == 200
        async with at(client, "203.0.113.9") as elsewhere:
            reply = await elsewhere.get(PATH, headers=right)
        assert reply.status_code == 200
        assert reply.headers["ratelimit-policy"].startswith('"requests";'), "the key's own count"


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("not an address", "_hidden", True),
    ],
)
async def test_what_counts_as_one_client(connect: Any, first: str, other: str, same: bool) -> None:
    async with connect(address_rate_limit="2/hour") as client:
        assert await codes(client, first, 3) == [200, 200, 429]
        assert await codes(client, other) == [429 if same else 200]


async def test_addresses_have_no_limit_unless_one_is_set(connect: Any) -> None:
    async with connect() as client:
        assert set(await codes(client, "192.0.2.1", 20)) == {200}
        limits = (await client.get("/v1/limits")).json()
        assert (limits["address_rate_limit"], limits["user_rate_limit"]) == (None, None)
    async with connect(address_rate_limit="9/hour", user_rate_limit="8/hour") as client:
        limits = (await client.get("/v1/limits")).json()
        assert (limits["address_rate_limit"], limits["user_rate_limit"]) == ("9/hour", "8/hour")


async def test_addresses_are_shared_over_valkey_and_in_memory_without(connect: Any, valkey: Any) -> None:
    shared = {"redis_url": valkey.url, "address_rate_limit": "2/hour"}
    async with connect(**shared) as one, connect(**shared) as two:
        assert await codes(one, "2001:db8::1") + await codes(two, "2001:db8::2") == [200, 200]
        assert await codes(one, "2001:db8::3") + await codes(two, "2001:db8::3") == [429, 429]
        async with redis.asyncio.Redis.from_url(valkey.url) as store:
            assert any(b"/address/2001:db8::/64/" in key for key in await store.keys("penstock:rate*"))
        valkey.kill()
        assert await codes(one, "2001:db8::1", 3) == [200, 200, 429]


@pytest.mark.parametrize("variable", ["user_rate_limit", "address_rate_limit"])
async def test_a_limit_that_cannot_be_read(deployment: Any, variable: str) -> None:
    async with deployment.services(**{variable: "often"}) as services:
        with pytest.raises(ConfigError, match=f"PENSTOCK_{variable.upper()}: 'often' is no rate"):
            create_app(services)


# -- proxies ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(deployment: Any, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run the application in the server that coordinators use; yield a client."""
    async with (
        deployment.listening(address_rate_limit="2/hour", **more) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        yield client


async def forwarded(client: httpx.AsyncClient, *chains: str) -> list[int]:
    return [(await client.get(PATH, headers={"x-forwarded-for": chain})).status_code for chain in chains]


async def test_forwarded_addresses_are_ignored_without_a_trusted_proxy(
    deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # of the server's own, which would say otherwise
    async with serving(deployment) as client:
        assert await forwarded(client, "192.0.2.1", "192.0.2.2", "192.0.2.3") == [200, 200, 429]


async def test_a_trusted_proxy_names_the_client(deployment: Any) -> None:
    async with serving(deployment, forwarded_allow_ips="10.0.0.0/8, 127.0.0.1") as client:
        assert await forwarded(client, "192.0.2.1", "192.0.2.2", "192.0.2.3") == [200] * 3
        made_up = [f"198.51.100.{place}, 192.0.2.1, 10.0.0.7" for place in range(2)]
        assert await forwarded(client, *made_up) == [200, 429], "what stands before the trusted proxies is not believed"


@pytest.mark.parametrize("text", ["proxy.internal", "10.0.0.1/8", "*,10.0.0.1"])
async def test_proxies_that_cannot_be_read(deployment: Any, text: str) -> None:
    async with deployment.services(forwarded_allow_ips=text) as services:
        app = create_app(services)
        with pytest.raises(ConfigError, match="PENSTOCK_FORWARDED_ALLOW_IPS: "):
            server_of(app, services.settings)
