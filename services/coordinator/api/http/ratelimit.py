"""Rate limits per key, end user and client address, shared between replicas through Redis, else kept in memory."""

from __future__ import annotations

import ipaddress
import math
import time
from dataclasses import dataclass
from functools import lru_cache

import redis.asyncio
from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from penstock.services.coordinator.api.http.volatile import Volatile
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable

__all__ = ["Allowance", "RateLimiter", "parse_rate", "subscriber"]

NUM_STORES = 256
"""Number of in-memory stores. A store scans all its counters at every hit, so the counters are spread over many."""
PREFIX_V6 = 64
"""Length in bits of the network prefix by which IPv6 clients are counted, because a subscriber can use every address
within a /64 (RFC 6177)."""


@dataclass(frozen=True)
class Allowance:
    """Result of counting ``wanted`` requests against the limit ``policy``: the first ``granted`` of them may pass."""

    policy: str
    wanted: int
    granted: int
    remaining: int
    reset_s: int
    limit: int
    window_s: int

    @property
    def allowed(self) -> bool:
        """True if all ``wanted`` requests may pass."""
        return self.granted == self.wanted

    def headers(self) -> dict[str, str]:
        """Return ``RateLimit`` headers (IETF draft-ietf-httpapi-ratelimit-headers), with ``Retry-After`` if refused."""
        found = {
            "RateLimit-Policy": f'"{self.policy}";q={self.limit};w={self.window_s}',
            "RateLimit": f'"{self.policy}";r={self.remaining};t={self.reset_s}',
        }
        if not self.allowed:
            wait_s = max(1, self.reset_s)
            found |= {"Retry-After": str(wait_s), "retry-after-ms": str(1000 * wait_s)}
        return found

    def refusal(self, code: str, whose: str) -> HttpProblem:
        """Return the error (429) for a request beyond the limit.

        Args:
            whose: phrase that follows "requests" in the text, such as ``of this user``.
        """
        detail = f"more than {self.limit} requests {whose} in {self.window_s} s; wait {max(1, self.reset_s)} s"
        return HttpProblem(429, code, detail, headers=self.headers())


class RateLimiter:
    """Sliding-window counters: by caller (requests, live requests such as completions and feedback, generated tokens),
    by end user and by client address.

    Raises:
        ConfigError: a limit does not look like ``600/minute``.
    """

    def __init__(self, settings: ServiceSettings, volatile: Volatile) -> None:
        self._item = _limit_of("PENSTOCK_RATE_LIMIT", settings.rate_limit)
        self._live = _limit_of("PENSTOCK_LIVE_RATE_LIMIT", settings.live_rate_limit)
        self._user = _limit_or_none("PENSTOCK_USER_RATE_LIMIT", settings.user_rate_limit)
        self._address = _limit_or_none("PENSTOCK_ADDRESS_RATE_LIMIT", settings.address_rate_limit)
        self._tokens = _limit_or_none("PENSTOCK_TOKEN_RATE_LIMIT", settings.token_rate_limit)
        self._volatile = volatile
        self._local = [SlidingWindowCounterRateLimiter(MemoryStorage()) for _ in range(NUM_STORES)]
        self._shared = _on(volatile.client) if volatile.client is not None else None

    @property
    def limits_users(self) -> bool:
        """True if end users have a limit."""
        return self._user is not None

    async def hit(self, caller: str, notation: str | None = None, *, live: bool = False) -> Allowance:
        """Count one request of ``caller`` against its own limit ``notation``, like ``600/minute``.

        Without ``notation``, the deployment's limit applies; ``live`` requests have a limit and a count of their own.
        """
        item = parse_rate(notation) if notation is not None else self._live if live else self._item
        caller = f"{caller}:live" if live and notation is None else caller
        return await self._count("requests", item, (caller,))

    async def hit_address(self, host: str) -> Allowance | None:
        """Count one request of the client at ``host``; return None if addresses have no limit."""
        if self._address is None:
            return None
        return await self._count("address", self._address, ("address", subscriber(host)))

    async def take_user(self, caller: str, pseudonym: str, num_requests: int) -> Allowance | None:
        """Count the requests of an end user, up to the limit; return the allowance, or None if users have no limit."""
        if self._user is None:
            return None
        return await self._count("user", self._user, ("user", caller, pseudonym), num_requests)

    async def check_tokens(self, owner: str) -> None:
        """Count the first token of a new answer against the token limit of the key ``owner``. Raise HttpProblem (429)
        if the key has no tokens left."""
        found = await self.take_tokens(owner, 1)
        if found is not None and not found.allowed:
            wait_s = max(1, found.reset_s)
            detail = f"this key has used its {found.limit} tokens of {found.window_s} s; wait {wait_s} s"
            raise HttpProblem(429, "token_rate_limited", detail, headers=found.headers())

    async def take_tokens(self, owner: str, number: int) -> Allowance | None:
        """Charge ``owner`` for ``number`` tokens of an answer, at most for those left to it. Return what was granted
        and what is left, or None if there is no limit."""
        if self._tokens is None or number < 1:
            return None
        return await self._count("tokens", self._tokens, ("tokens", owner), number)

    async def _count(self, policy: str, item: RateLimitItem, who: tuple[str, ...], wanted: int = 1) -> Allowance:
        async def count_in(counters: SlidingWindowCounterRateLimiter) -> Allowance:
            granted, left, reset_at = await _take(counters, item, who, wanted)
            reset_s = max(0, math.ceil(reset_at - time.time()))
            return Allowance(policy, wanted, granted, left, reset_s, item.amount, item.get_expiry())

        shared = self._shared
        if shared is not None:
            try:
                return await self._volatile.call(lambda _: count_in(shared))
            except Unavailable:
                pass  # fall back to this process's own count
        return await count_in(self._local[hash(who) % NUM_STORES])


async def _take(
    counters: SlidingWindowCounterRateLimiter, item: RateLimitItem, who: tuple[str, ...], wanted: int
) -> tuple[int, int, float]:
    """Count ``wanted`` requests of ``who``; return ``(number that may pass, number left after them, Unix time at which
    more may pass)``."""
    granted = wanted if await counters.hit(item, *who, cost=wanted) else 0
    stats = await counters.get_window_stats(item, *who)
    if granted:
        return granted, stats.remaining, stats.reset_time
    some = min(wanted, stats.remaining)
    if some and await counters.hit(item, *who, cost=some):
        granted = some
    return granted, 0, stats.reset_time


def subscriber(host: str) -> str:
    """Return the address, or the IPv6 network, under which ``host`` is counted; "unknown" if it is no IP address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), PREFIX_V6), strict=False))


def _limit_of(variable: str, notation: str) -> RateLimitItem:
    try:
        return parse_rate(notation)
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None


def _limit_or_none(variable: str, notation: str) -> RateLimitItem | None:
    return _limit_of(variable, notation) if notation else None


@lru_cache(maxsize=256)
def parse_rate(notation: str) -> RateLimitItem:
    """Parse a limit like ``600/minute``.

    Raises:
        ConfigError: the notation is not valid.
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
