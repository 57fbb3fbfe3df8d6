"""Requests per key and time, shared between replicas through Redis and kept in memory while that is away."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache

import redis.asyncio
from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from penstock.services.coordinator.api.volatile import Volatile
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable

__all__ = ["Allowance", "RateLimiter", "parse_rate"]


@dataclass(frozen=True)
class Allowance:
    """The verdict on one request."""

    allowed: bool
    remaining: int
    reset_s: int
    limit: int
    window_s: int

    def headers(self) -> dict[str, str]:
        """``RateLimit`` and its policy (IETF draft-ietf-httpapi-ratelimit-headers), ``Retry-After`` if refused."""
        found = {
            "RateLimit-Policy": f'"requests";q={self.limit};w={self.window_s}',
            "RateLimit": f'"requests";r={self.remaining};t={self.reset_s}',
        }
        if not self.allowed:
            found["Retry-After"] = str(max(1, self.reset_s))
        return found


class RateLimiter:
    """Sliding-window counters, one per caller, and another one for its live requests (models and feedback).

    Raises:
        ConfigError: a limit is not like ``600/minute``.
    """

    def __init__(self, settings: ServiceSettings, volatile: Volatile) -> None:
        self._item = _limit_of("PENSTOCK_RATE_LIMIT", settings.rate_limit)
        self._live = _limit_of("PENSTOCK_LIVE_RATE_LIMIT", settings.live_rate_limit)
        self._volatile = volatile
        self._local = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._shared = _on(volatile.client) if volatile.client is not None else None

    async def hit(self, caller: str, notation: str | None = None, *, live: bool = False) -> Allowance:
        """Count one request of ``caller`` against its own limit, or else the deployment's."""
        item = parse_rate(notation) if notation is not None else self._live if live else self._item
        caller = f"{caller}:live" if live and notation is None else caller
        shared = self._shared
        if shared is not None:

            async def work(_: redis.asyncio.Redis) -> Allowance:
                return await self._count(shared, item, caller)

            try:
                return await self._volatile.call(work)
            except Unavailable:
                pass  # the same limit, counted by this process alone
        return await self._count(self._local, item, caller)

    async def _count(self, limiter: SlidingWindowCounterRateLimiter, item: RateLimitItem, caller: str) -> Allowance:
        allowed = await limiter.hit(item, caller)
        stats = await limiter.get_window_stats(item, caller)
        reset_s = max(0, math.ceil(stats.reset_time - time.time()))
        return Allowance(allowed, stats.remaining, reset_s, item.amount, item.get_expiry())


def _limit_of(variable: str, notation: str) -> RateLimitItem:
    try:
        return parse_rate(notation)
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None


@lru_cache(maxsize=256)
def parse_rate(notation: str) -> RateLimitItem:
    """A limit like ``600/minute``.

    Raises:
        ConfigError: it does not look like that.
    """
    try:
        return parse(notation)
    except ValueError:
        raise ConfigError(f"'{notation}' is no rate; it must look like 600/minute") from None


def _on(client: redis.asyncio.Redis) -> SlidingWindowCounterRateLimiter:
    storage = RedisStorage(
        "async+redis://", implementation="redispy", key_prefix="penstock:rate", connection_pool=client.connection_pool
    )
    return SlidingWindowCounterRateLimiter(storage)
