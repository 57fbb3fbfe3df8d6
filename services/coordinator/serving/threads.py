"""Conversations of clients that name no episode: a chat that continues an answer belongs to the answer's episode.

Digests of this gateway's answers are in memory, those of other replicas in the bucket `answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.transport.bus import Bus

__all__ = ["KEEP_S", "Threads"]

KEEP_S = 1800.0
"""Lifetime of the bucket's entries, in seconds."""
MAX_THREADS = 65536
ASK_S = 0.5
"""Longest time that a request spends on the bucket, in seconds; on timeout the chat is an episode of its own."""
PREFIX = "said"


class Threads:
    """Episodes of conversations, by digest. The digest covers the job, the API key, the user, and the messages up to
    and including an answer."""

    def __init__(self, bus: Bus) -> None:
        self._kv = bus.kv(subjects.ANSWERS)
        self._episodes: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """Pairs ``(time of an answer, episode)``, by digest."""

    async def find(
        self, owner: Sequence[str], messages: Sequence[dict[str, Any]], within_s: float = KEEP_S
    ) -> str:  # fmt: skip
        """Find the longest prefix of ``messages`` that ends in an answer of this deployment; return its episode, or ''.

        Only the last answer in ``messages`` is looked up among other replicas' answers. Answers older than ``within_s``
        seconds are ignored.
        """
        within_s = min(within_s, KEEP_S)
        found, newest = "", b""
        for message, digest in _digests(owner, messages):
            if message.get("role") == "assistant":
                newest, known = digest, self._episodes.get(digest)
                if known is not None and known[0] + within_s > time.monotonic():
                    found = known[1]
        return found or (await self._ask(newest, within_s) if newest else "")

    async def remember(
        self, owner: Sequence[str], messages: Sequence[dict[str, Any]], answer: dict[str, Any], episode: str
    ) -> None:
        """Store that ``answer`` to ``messages`` belongs to ``episode``, for all replicas."""
        *_, (_, digest) = _digests(owner, [*messages, answer])
        self._episodes[digest] = time.monotonic(), episode
        self._episodes.move_to_end(digest)
        while len(self._episodes) > MAX_THREADS:
            self._episodes.popitem(last=False)
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(ASK_S):
                await self._kv.put(_name(digest), episode.encode())

    async def _ask(self, digest: bytes, within_s: float) -> str:
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(ASK_S):
                entry = await self._kv.get(_name(digest))
                is_young = entry is not None and entry.time + within_s > bus_time()
                return entry.value.decode() if is_young and entry is not None and entry.value is not None else ""
        return ""


def _name(digest: bytes) -> str:
    return f"{PREFIX}.{digest.hex()}"


def _digests(owner: Sequence[str], messages: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], bytes]]:
    digest = blake2b(json.dumps(list(owner)).encode(), digest_size=16)
    for message in messages:
        digest.update(json.dumps(_comparable(message)).encode())
        yield message, digest.digest()


def _comparable(message: dict[str, Any]) -> list[Any]:
    """Return the parts of a message to compare; clients add fields of their own when they send an answer back."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or []]
    called = [(call.get("name"), _compact(call.get("arguments"))) for call in calls]
    return [message.get("role"), content or "", called, message.get("tool_call_id")]


def _compact(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
