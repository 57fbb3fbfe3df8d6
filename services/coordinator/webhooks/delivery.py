"""Delivery of events to webhooks, in order and at least once, from a stored position. Only the leader runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from datetime import timedelta

import httpx

from penstock.services.coordinator.webhooks.cloudevent import CloudEvent, event_of
from penstock.services.coordinator.webhooks.posting import GoneError, open_http, post_event
from penstock.services.coordinator.webhooks.store import WebhookStore
from penstock.shared.errors import NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.webhooks import DeliveryState, StoredWebhook
from penstock.shared.runtime import metrics
from penstock.shared.runtime.tasks import end_tasks, unexpected
from penstock.shared.transport.bus import Bus

__all__ = ["Courier"]

logger = logging.getLogger(__name__)

ATTEMPTS = metrics.counter("webhook_attempts", "Deliveries tried.", ("outcome",))

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 3600.0
GIVE_UP_AFTER = timedelta(days=1)
"""A webhook that fails for longer than this is disabled; all further events wait until a user enables it again."""
SAVE_EVERY = 1000
"""Number of skipped events after which the position of a webhook is stored again."""
RETRY_S = 1.0


class Courier:
    """Delivery service with one task for each enabled webhook."""

    def __init__(self, bus: Bus, store: WebhookStore, *, private: bool) -> None:
        """``private``: also deliver to private addresses."""
        self._bus, self._store, self._private = bus, store, private
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Deliver events until cancelled."""
        try:
            async for id, hook in self._store.watch():
                await self._stop(id)
                if hook is not None and hook.enabled:
                    self._tasks[id] = asyncio.create_task(self._serve(hook), name=f"webhook {id}")
        finally:
            for id in list(self._tasks):
                await self._stop(id)

    async def _stop(self, id: str) -> None:
        task = self._tasks.pop(id, None)
        if task is not None:
            await end_tasks([task])

    async def _serve(self, hook: StoredWebhook) -> None:
        """Deliver events to ``hook`` until cancelled, disabled or deleted; outages of the bus only delay deliveries."""
        while (error := await unexpected(self._deliver(hook))) is not None:
            if isinstance(error, NotFound):
                return
            if isinstance(error, GoneError) and await unexpected(self._switch_off(hook, str(error))) is None:
                return
            known = isinstance(error, Unavailable | GoneError)
            logger.warning("webhook %s waits: %s", hook.id, error, exc_info=None if known else error)
            await asyncio.sleep(RETRY_S)

    async def _deliver(self, hook: StoredWebhook) -> None:
        state = await self._store.state(hook.id)
        saved = state.sequence
        subject = subjects.events(hook.job or "*")
        async with (
            open_http() as http,
            contextlib.aclosing(self._bus.follow(subjects.EVENTS, subject, start_seq=state.sequence + 1)) as messages,
        ):
            async for message in messages:
                event = event_of(message)
                if hook.wants(event.type):
                    state = await self._until_taken(http, hook, state, event)
                    state = DeliveryState(
                        sequence=message.seq, delivered=state.delivered + 1, last_delivery_at=bus_datetime()
                    )
                elif message.seq - saved < SAVE_EVERY:
                    continue
                else:
                    state = state.model_copy(update={"sequence": message.seq})
                await self._store.save(hook.id, state)
                saved = message.seq

    async def _until_taken(
        self, http: httpx.AsyncClient, hook: StoredWebhook, state: DeliveryState, event: CloudEvent
    ) -> DeliveryState:
        """Post an event until the receiver accepts it; return ``state`` with all failed attempts counted.

        Raises:
            GoneError: the webhook must be disabled.
        """
        while True:
            try:
                await post_event(http, hook, event, private=self._private)
            except Unavailable as error:
                ATTEMPTS.labels("failed").inc()
                state = state.model_copy(
                    update={
                        "attempts": state.attempts + 1,
                        "failing_since": state.failing_since or bus_datetime(),
                        "last_error": str(error),
                    }
                )
                await self._store.save(hook.id, state)
                assert state.failing_since is not None
                if bus_datetime() - state.failing_since > GIVE_UP_AFTER:
                    raise GoneError(f"event {event.id} was not accepted for {GIVE_UP_AFTER}: {error}") from None
                await asyncio.sleep(_pause_s(state.attempts))
            else:
                ATTEMPTS.labels("delivered").inc()
                return state

    async def _switch_off(self, hook: StoredWebhook, reason: str) -> None:
        logger.error("webhook %s is switched off: %s", hook.id, reason)
        with contextlib.suppress(NotFound):
            await self._store.change(hook.id, {"enabled": False, "disabled_reason": reason})


def _pause_s(attempts: int) -> float:
    """Return the pause after ``attempts`` failures: 1 s, doubled per failure up to 1 h, less up to 20 % at random."""
    return float(min(FIRST_PAUSE_S * 2 ** min(attempts - 1, 20), LONGEST_PAUSE_S) * random.uniform(0.8, 1.0))
