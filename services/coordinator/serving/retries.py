"""Holds answers that clients left unread, so that a client's automatic retry gets the answer to its earlier attempt."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

from penstock.services.coordinator.serving.answer import Answer

__all__ = ["Retries", "key_of"]

COME_BACK_S = 10.0
"""Seconds for which an unread answer is kept for a retry; common client libraries wait up to 8 s before a retry."""
LEAVE_S = 1.0
"""Seconds to wait for the disconnect of an earlier attempt, since the retry may arrive first."""
POLL_S = 0.1
MAX_KEPT = 512


def key_of(job: str, key_id: str, episode: str, body_digest: str) -> str:
    """Return the key that all attempts of one request share, as 32 hex digits."""
    return blake2b(json.dumps([job, key_id, episode, body_digest]).encode(), digest_size=16).hexdigest()


class Retries:
    """Unread answers of this gateway. Calls ``give_up`` for an answer if no retry came for it."""

    def __init__(self, give_up: Callable[[Answer], None]) -> None:
        self.kept: list[Answer] = []
        """Unread answers, oldest first."""
        self._give_up = give_up
        self._reading: Counter[str] = Counter()
        """Number of connected clients that retry automatically, by key."""

    def read(self, key: str) -> None:
        """Count one more client that waits for an answer to the request with this key."""
        self._reading[key] += 1

    def left(self, key: str) -> None:
        """Count one client fewer that waits for an answer to the request with this key."""
        self._reading[key] -= 1
        if self._reading[key] <= 0:
            del self._reading[key]

    async def earlier(self, key: str, request: str = "") -> Answer | None:
        """Return an unread answer with this key (to the request ``request``, if given) and count its reader; None if
        there is no such answer.

        An answer that is being read belongs to another client with the same body.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + LEAVE_S
        while True:
            for answer in self.kept:
                if answer.key == key and answer.error is None and request in ("", answer.id):
                    self.unkeep(answer)
                    self.read(key)
                    return answer
            if not self._reading[key] or clock() > end:
                return None
            await asyncio.sleep(POLL_S)

    def keep(self, answer: Answer) -> None:
        """Keep an answer for a retry of its client, which disconnected before it received any part of the answer."""
        answer.end = asyncio.get_running_loop().call_later(COME_BACK_S, self._give_up, answer)
        self.kept.append(answer)
        if len(self.kept) > MAX_KEPT:
            self._give_up(self.kept[0])

    def unkeep(self, answer: Answer) -> None:
        """Stop keeping an answer: a client reads it again, or the gateway has given it up."""
        if answer.end is not None:
            answer.end.cancel()
            answer.end = None
            self.kept.remove(answer)
