"""Webhooks and their delivery states, stored in the bucket `webhooks`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import uuid6
from pydantic import ValidationError

from penstock.services.coordinator.webhooks.cloudevent import trial_event
from penstock.services.coordinator.webhooks.posting import GoneError, open_http, post_event
from penstock.services.coordinator.webhooks.signing import new_secret
from penstock.shared.errors import Conflict, NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.webhooks import DeliveryState, StoredWebhook
from penstock.shared.transport.address import check_url
from penstock.shared.transport.bus import Bus, Entry

__all__ = ["MAX_WEBHOOKS", "WebhookStore"]

logger = logging.getLogger(__name__)

MAX_WEBHOOKS = 100
"""Maximum number of webhooks of a deployment."""
CAS_TRIES = 10
HOOKS, STATES = "hook", "state"


class WebhookStore:
    """Store of webhooks, shared by all replicas. Methods with an id raise NotFound if no webhook has the id."""

    def __init__(self, bus: Bus, *, private: bool) -> None:
        """``private``: also allow private addresses."""
        self._bus, self._private = bus, private
        self._kv = bus.kv(subjects.WEBHOOKS)

    async def create(
        self, url: str, types: list[str], *, job: str | None, description: str, key: str = ""
    ) -> StoredWebhook:
        """Store a new webhook, which gets the events from now on. If ``key`` was used before, return the webhook that
        the earlier call created.

        The position is stored before the webhook, so that every webhook has a position.

        Raises:
            Conflict: the deployment has MAX_WEBHOOKS webhooks.
            ConfigError: the address is not allowed.
        """
        check_url(url, private=self._private)
        id = f"wh_{hashlib.sha256(key.encode()).hexdigest()[:32] if key else uuid6.uuid7().hex}"
        with contextlib.suppress(NotFound):
            return await self.find(id)
        if len(await self._kv.keys(HOOKS)) >= MAX_WEBHOOKS:
            raise Conflict(f"there are {MAX_WEBHOOKS} webhooks already; delete one")
        hook = StoredWebhook(
            id=id, url=url, types=types, job=job, description=description, created_at=bus_datetime(),
            secret=new_secret(),
        )  # fmt: skip
        begun = DeliveryState(sequence=(await self._bus.stream_state(subjects.EVENTS)).last_seq)
        with contextlib.suppress(Conflict):  # an earlier attempt stored it, and deliveries may have advanced since
            await self._kv.create(f"{STATES}.{id}", begun.model_dump_json().encode())
        try:
            await self._kv.create(f"{HOOKS}.{id}", hook.model_dump_json().encode())
        except Conflict:
            return await self.find(id)
        return hook

    async def find(self, id: str) -> StoredWebhook:
        """Return a webhook."""
        return (await self._find(id))[0]

    async def _find(self, id: str) -> tuple[StoredWebhook, int]:
        entry = await self._kv.get(f"{HOOKS}.{id}")
        if entry is None or entry.value is None:
            raise NotFound(f"no webhook '{id}'")
        return StoredWebhook.model_validate_json(entry.value), entry.revision

    async def list_all(self) -> list[StoredWebhook]:
        """Return all webhooks, oldest first."""
        entries = await self._kv.entries(HOOKS)
        hooks = [StoredWebhook.model_validate_json(entry.value) for entry in entries if entry.value is not None]
        return sorted(hooks, key=lambda hook: (hook.created_at, hook.id))

    async def change(self, id: str, changes: dict[str, Any]) -> StoredWebhook:
        """Update fields of a webhook. Raises ConfigError: the address is not allowed."""
        if "url" in changes:
            check_url(changes["url"], private=self._private)
        for _ in range(CAS_TRIES):
            hook, revision = await self._find(id)
            if changes.get("enabled") and not hook.enabled:  # no delivery task writes it now
                begun = {"attempts": 0, "failing_since": None}
                await self.save(id, (await self.state(id)).model_copy(update=begun))
                changes = {**changes, "disabled_reason": ""}
            changed = hook.model_copy(update=changes)
            try:
                await self._kv.update(f"{HOOKS}.{id}", changed.model_dump_json().encode(), revision)
            except Conflict:
                continue
            return changed
        raise Conflict(f"webhook '{id}' changes too often; try again")

    async def delete(self, id: str) -> None:
        """Delete a webhook."""
        await self.find(id)
        await self._kv.delete(f"{HOOKS}.{id}")
        await self._kv.delete(f"{STATES}.{id}")

    async def state(self, id: str) -> DeliveryState:
        """Return the delivery state of a webhook."""
        entry = await self._kv.get(f"{STATES}.{id}")
        if entry is None or entry.value is None:
            raise NotFound(f"no webhook '{id}'")
        return DeliveryState.model_validate_json(entry.value)

    async def test(self, id: str) -> str:
        """Post a test event once, now; return '' on success, else the reason."""
        hook = await self.find(id)
        async with open_http() as http:
            try:
                await post_event(http, hook, trial_event(id), private=self._private)
            except (Unavailable, GoneError) as error:
                return str(error)
        return ""

    async def save(self, id: str, state: DeliveryState) -> None:
        """Store the delivery state of a webhook."""
        await self._kv.put(f"{STATES}.{id}", state.model_dump_json().encode())

    async def watch(self) -> AsyncIterator[tuple[str, StoredWebhook | None]]:
        """Yield ``(id, webhook)`` for every webhook now and after each change; None for a deleted or unreadable one."""
        async for entry in self._kv.watch(HOOKS):
            yield entry.key.removeprefix(f"{HOOKS}."), _readable(entry)


def _readable(entry: Entry) -> StoredWebhook | None:
    """Parse a webhook; None if it was deleted or another version of the API wrote it."""
    if entry.value is None:
        return None
    try:
        return StoredWebhook.model_validate_json(entry.value)
    except ValidationError as error:
        logger.error("webhook %s cannot be read, so nothing is delivered: %s", entry.key, error)
        return None
