"""Applies ``rollout.on_update``: groups in progress outlast an update, begin again, or must end before the update."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from penstock.services.rollout.engines import Engine
from penstock.services.rollout.tickets import HandedOver
from penstock.shared.config.rollout import AnyRollout
from penstock.shared.protocol import subjects
from penstock.shared.protocol.generation import Sample
from penstock.shared.protocol.trajectory import Group
from penstock.shared.runtime import metrics

__all__ = ["Attempt", "CommitRule"]

logger = logging.getLogger(__name__)

DISCARDED = metrics.counter("rollout_discarded_tokens", "Tokens of groups that began again because of new weights.")


class Attempt:
    """One attempt to generate a group.

    Attributes:
        begun: saved completions of another worker, by index in the group: aborted ones are continued, others are final.
        requests: index of the completion that an open engine request generates, by request id.
        ended: completions that have ended, by index in the group.
        discarded: True once new weights made the tokens useless: the attempt sends no further request.
        handed_over: True once another worker shall continue the group: the attempt sends no further request.
        saved_at: monotonic time (seconds) at which the attempt began, or of the last try to save its completions.
        saved: indices of the completions that were saved after they had ended.
    """

    def __init__(self) -> None:
        self.begun: Mapping[int, Sample] = {}
        self.requests: dict[str, int] = {}
        self.ended: dict[int, Sample] = {}
        self.discarded = self.handed_over = False
        self.saved_at, self.saved = time.monotonic(), set[int]()


class CommitRule:
    """Applies ``rollout.on_update`` to the training groups of one job on one worker.

    Args:
        wait: called when a ticket waits, with the key of the ticket, a text on what it waits for, and a bus subject.
        done: called with the key of a ticket once the ticket no longer waits.
        on_open: called when groups may begin again.
    """

    def __init__(
        self,
        config: AnyRollout,
        engine: Engine,
        *,
        wait: Callable[[str, str, str], None] = lambda key, what, subject: None,
        done: Callable[[str], None] = lambda key: None,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._engine = config, engine
        self._wait, self._done, self._on_open = wait, done, on_open
        self.attempts: set[Attempt] = set()
        """Groups in progress."""
        self._changed = asyncio.Event()
        self.is_open = True
        """False while no group may begin, because an update to new weights must come first."""
        self.is_leaving = False
        """True once this worker is leaving, so that it begins no further group."""
        self._arriving, self._applied = (-1, ""), (-1, "")
        """Version and digest of the newest update, and of the newest update to which the rule was applied."""
        self.discarded_tokens = 0
        """Number of generated tokens that updates made useless, since the start of this worker."""

    async def make(self, key: str, generate: Callable[[Attempt], Awaitable[Group]]) -> Group:
        """Generate and return a group. If an update discards it (``on_update: restart``), generate the group again.

        Args:
            key: key of the ticket.
            generate: generates the whole group. The same ticket gives the same seeds and another attempt id.

        Raises:
            HandedOver: this worker leaves, and the group has not begun.
        """
        while True:
            if not self.is_open and not self.is_leaving:
                self._wait(key, "an update to newer weights", subjects.MANIFESTS)
                await self._until(lambda: self.is_open or self.is_leaving)
                self._done(key)
            if self.is_leaving:
                raise HandedOver("this worker leaves")
            attempt = Attempt()
            self.attempts.add(attempt)
            try:
                group = await generate(attempt)
            finally:
                self.attempts.remove(attempt)
                self._changed.set()
            if not attempt.discarded:
                return group
            num_tokens = int(group.mask.sum())
            self.discarded_tokens += num_tokens
            DISCARDED.inc(num_tokens)

    def leave(self) -> None:
        """Begin no further group, and release every group and update that waits. Groups in progress go on. Safe to
        repeat."""
        self.is_leaving = True
        self._changed.set()

    @asynccontextmanager
    async def update(self, version: int, digest: str) -> AsyncIterator[bool]:
        """Return a context in which the caller loads an announced version of the weights. The context yields True if it
        first waited for groups in progress.

        With 'drain', no group begins in the block, and the update first waits for the groups in progress. After
        ``rollout.drain_s`` groups may begin again, and the groups in progress continue with the new version: discarding
        them would lose the longest completions at each update, and bias the job against long ones. Groups in progress
        also continue if this worker leaves, or if an earlier update to the same version waited and then failed.
        """
        self._arriving = version, digest
        if self._config.on_update != "drain" or self._arriving == self._applied:
            try:
                yield False
            finally:
                self._open()
            return
        self.is_open = False
        timer = asyncio.get_running_loop().call_later(self._config.drain_s, self._open)
        try:
            num_groups = len(self.attempts)
            await self._until(lambda: self.is_open or self.is_leaving or not self.attempts)
            self._applied = self._arriving
            if self.attempts:
                why = "this worker leaves" if self.is_leaving else "rollout.drain_s is over"
                logger.info("%d groups go on under newer weights: %s", len(self.attempts), why)
            yield num_groups > 0
        finally:
            timer.cancel()
            self._open()

    async def interrupt(self) -> None:
        """If ``on_update`` is 'restart', discard the groups in progress; called just before the engine serves new
        weights.

        These groups begin again at the end of the block of ``update``. Other requests of the engine continue. If the
        update then fails, a later attempt to load the same version discards nothing: a version that cannot be served
        must not keep groups from finishing.
        """
        if self._config.on_update != "restart" or self._arriving == self._applied:
            return
        self._applied = self._arriving
        self.is_open = False
        unfinished = [attempt for attempt in self.attempts if attempt.requests]
        for attempt in unfinished:
            attempt.discarded = True
        if unfinished:
            await self._engine.abort({request for attempt in unfinished for request in attempt.requests})

    def _open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._changed.set()
            self._on_open()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
