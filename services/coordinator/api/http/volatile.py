"""Redis or Valkey as an optional store: calls have short timeouts, and fail at once while a circuit breaker is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from penstock.shared.errors import Unavailable

__all__ = ["CALL_TIMEOUT_S", "Volatile"]

CALL_TIMEOUT_S = 0.25
"""Longest time in seconds that a request waits for Redis before it continues without it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0

T = TypeVar("T")
log = logging.getLogger(__name__)


class Volatile:
    """Optional Redis connection: ``call`` is quick, or raises Unavailable at once while Redis is down."""

    def __init__(self, url: str | None) -> None:
        self.client = _client(url) if url else None
        self._closed_until = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._away = False

    @property
    def configured(self) -> bool:
        """True if the deployment has a Redis URL."""
        return self.client is not None

    async def answers(self) -> bool:
        """Ping Redis and return True if it answers. While the circuit breaker is open, return False without a ping."""
        with contextlib.suppress(Unavailable):
            await self.call(lambda client: client.ping())
        return not self._away

    async def call(self, work: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
        """Run ``work`` on the client within CALL_TIMEOUT_S.

        Raises:
            Unavailable: Redis is not configured, failed or timed out, or the breaker is open after a recent failure.
        """
        client, probing = self.client, self._away
        now = time.monotonic()
        if client is None or now < self._closed_until:
            raise Unavailable("redis is not in use at the moment")
        if probing:  # one caller probes; the others continue without waiting for the result
            self._closed_until = now + 2 * CALL_TIMEOUT_S
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                result = await work(client)
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error, probing=probing)
            raise Unavailable(f"redis: {error or type(error).__name__}") from None
        self._answered()
        return result

    async def close(self) -> None:
        """Close the connections to Redis."""
        if self.client is not None:
            await self.client.aclose()

    def _failed(self, error: BaseException, *, probing: bool) -> None:
        if self._away and not probing:  # a call that began before the failure was known
            return
        if not self._away:
            log.warning("redis is away (%s); going on with memory only", error or type(error).__name__)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S) if self._away else _FIRST_PAUSE_S
        self._away = True
        self._closed_until = time.monotonic() + self._pause_s

    def _answered(self) -> None:
        if self._away:
            log.info("redis is back")
        self._away, self._closed_until, self._pause_s = False, 0.0, _FIRST_PAUSE_S


def _client(url: str) -> redis.asyncio.Redis:
    """Return a client that fails fast, and reconnects once if a pooled connection is dead."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=CALL_TIMEOUT_S,
        socket_connect_timeout=CALL_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),
        max_connections=64,
    )
