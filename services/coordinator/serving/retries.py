"""Requests that clients repeat by themselves: an answer that its client left unread is given to the next try."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

from penstock.services.coordinator.serving.answer import Answer

__all__ = ["Retries", "key_of"]

COME_BACK_S = 10.0
"""A client that repeats requests by itself may come back for an answer within this time; stock SDKs wait up to 8 s."""
LEAVE_S = 1.0
"""A retry may arrive before it is noticed that the client left its first try."""
LOOK_S = 0.1
MAX_KEPT = 512


def key_of(job: str, key_id: str, episode: str, body_digest: str) -> str:
    """Common id of the tries of one request, as 32 hex digits."""
    return blake2b(json.dumps([job, key_id, episode, body_digest]).encode(), digest_size=16).hexdigest()


class Retries:
    """The answers that were left unread here. ``give_up`` ends one for which nobody came back."""

    def __init__(self, give_up: Callable[[Answer], None]) -> None:
        self.kept: list[Answer] = []
        """The oldest first."""
        self._give_up = give_up
        self._reading: Counter[str] = Counter()
        """Requests of clients that ask again by themselves and have not left yet, by key."""

    def read(self, key: str) -> None:
        """A client waits for an answer."""
        self._reading[key] += 1

    def left(self, key: str) -> None:
        """A client does not wait any more."""
        self._reading[key] -= 1
        if self._reading[key] <= 0:
            del self._reading[key]

    async def earlier(self, key: str, request: str = "") -> Answer | None:
        """An answer (to ``request``, if that is given) that was left unread; it is ``read`` from now on.

        One that somebody reads belongs to another client with the same body.
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
            await asyncio.sleep(LOOK_S)

    def keep(self, answer: Answer) -> None:
        """Its client left before it got anything, and may come back."""
        answer.end = asyncio.get_running_loop().call_later(COME_BACK_S, self._give_up, answer)
        self.kept.append(answer)
        if len(self.kept) > MAX_KEPT:
            self._give_up(self.kept[0])

    def unkeep(self, answer: Answer) -> None:
        """Mark the try as read again, or given up."""
        if answer.end is not None:
            answer.end.cancel()
            answer.end = None
            self.kept.remove(answer)
