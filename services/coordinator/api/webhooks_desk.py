"""Webhooks as the HTTP API uses them. Implemented in ``coordinator.webhooks``."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.shared.protocol.webhooks import DeliveryState, StoredWebhook

__all__ = ["MAX_WEBHOOKS", "Webhooks"]

MAX_WEBHOOKS = 100
"""Of a deployment."""


class Webhooks(Protocol):
    """Webhooks, the same on every replica. Whatever takes an id raises NotFound for an unknown one."""

    async def create(
        self, url: str, types: list[str], *, job: str | None, description: str, key: str = ""
    ) -> StoredWebhook:
        """Store a new one, from the next event on; with a ``key`` that came before, the one that it made.

        Raises:
            Conflict: there are too many.
            ConfigError: the address.
        """
        ...

    async def find(self, id: str) -> StoredWebhook:
        """One of them."""
        ...

    async def list_all(self) -> list[StoredWebhook]:
        """Every one, oldest first."""
        ...

    async def change(self, id: str, changes: dict[str, Any]) -> StoredWebhook:
        """Write new values of fields. Raises ConfigError: the address."""
        ...

    async def delete(self, id: str) -> None:
        """Forget it."""
        ...

    async def state(self, id: str) -> DeliveryState:
        """How far it is."""
        ...

    async def test(self, id: str) -> str:
        """Post an event of no job once, now; empty, or why it was not taken."""
        ...
