"""Replies of a judge by digest of the request: in memory, and in Redis or Valkey where there is one."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import redis
from redis.exceptions import RedisError

__all__ = ["ReplyCache"]

log = logging.getLogger(__name__)

_MAX_ENTRIES = 8192
_KEEP_S = 7 * 24 * 3600
_TIMEOUT_S = 0.25
_PAUSE_S = 10.0
_PREFIX = "penstock:judge:"


class ReplyCache:
    """Lost entries are asked for again: a server that is away is passed over for a while and fails no completion."""

    def __init__(self, url: str | None) -> None:
        """``url`` of Redis or Valkey; None keeps replies in this process only."""
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._closed_until = 0.0
        self._client = (
            redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S) if url else None
        )

    def close(self) -> None:
        """Drop the connections."""
        if self._client is not None:
            self._client.close()

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """The replies that are known."""
        found = {key: self._memory[key] for key in keys if key in self._memory}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing and self._client is not None and time.monotonic() >= self._closed_until:
            try:
                values = self._client.mget([_PREFIX + key for key in missing])
            except (RedisError, OSError) as error:
                self._away(error)
            else:
                there = {key: value.decode() for key, value in zip(missing, values, strict=True) if value is not None}
                self._remember(there)
                found |= there
        for key in found:
            if key in self._memory:
                self._memory.move_to_end(key)
        return found

    def add(self, replies: Mapping[str, str]) -> None:
        """Keep replies; the ones longest not asked for go first."""
        self._remember(replies)
        if replies and self._client is not None and time.monotonic() >= self._closed_until:
            try:
                with self._client.pipeline(transaction=False) as pipeline:
                    for key, reply in replies.items():
                        pipeline.set(_PREFIX + key, reply, ex=_KEEP_S)
                    pipeline.execute()
            except (RedisError, OSError) as error:
                self._away(error)

    def _remember(self, replies: Mapping[str, str]) -> None:
        self._memory.update(replies)
        while len(self._memory) > _MAX_ENTRIES:
            self._memory.popitem(last=False)

    def _away(self, error: Exception) -> None:
        self._closed_until = time.monotonic() + _PAUSE_S
        log.warning("the judge's cache is away (%s); asking without it for %g s", error, _PAUSE_S)
