"""Repeats a leader's writes as long as the bus refuses them, without a deadline, and reports the wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.shared.errors import StreamFull, Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.runtime import metrics

__all__ = ["Blocked", "Retry"]

logger = logging.getLogger(__name__)

RETRY_S = 0.2
LOG_EVERY_S = 30.0
BLOCKED_S = metrics.counter(
    "coordinator_blocked_seconds", "Seconds for which leaders of jobs waited for the bus.", ["stream"]
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Blocked:
    """A write that waits: the bus has refused ``what`` on ``subject`` since ``since`` (Unix seconds), with the error
    ``why``."""

    what: str
    subject: str
    since: float
    why: str


class Retry:
    """Repeats the writes that a leader needs before it continues; a leader that loses its lease is cancelled.

    Args:
        report: called once for each write that a full stream refuses, with a message for users.
    """

    def __init__(self, job: str, report: Callable[[str], None] = lambda text: None) -> None:
        self._job, self._report = job, report
        self._held: dict[object, Blocked] = {}

    @property
    def blocked(self) -> Blocked | None:
        """The longest wait, or None while the bus accepts everything."""
        return min(self._held.values(), key=lambda held: held.since, default=None)

    async def until_taken(self, what: str, subject: str, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``work`` until it no longer raises Unavailable; ``blocked`` shows the wait meanwhile."""
        began = seen = time.monotonic()
        since, logged, is_reported, key = bus_time(), float("-inf"), False, object()
        try:
            while True:
                try:
                    return await work()
                except Unavailable as error:
                    self._held[key] = Blocked(what, subject, since, str(error))
                    if not is_reported and isinstance(error, StreamFull):
                        self._report(f"{what} must wait: {error}")
                        is_reported = True
                    if time.monotonic() - logged >= LOG_EVERY_S:
                        logged = time.monotonic()
                        logger.warning(
                            "%s: %s waits for %.0f s already: %s", self._job, what, logged - began, error
                        )  # fmt: skip
                await asyncio.sleep(RETRY_S)
                BLOCKED_S.labels(subject.partition(".")[0]).inc(time.monotonic() - seen)
                seen = time.monotonic()
        finally:
            self._held.pop(key, None)
