"""Webhooks: address, subscribed events and delivery state, as stored and as returned by the API."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DEFAULT_TYPES", "DeliveryState", "StoredWebhook", "WebhookRecord"]

DEFAULT_TYPES = ("rl.job.succeeded.v1", "rl.job.failed.v1", "rl.job.cancelled.v1")


class DeliveryState(BaseModel):
    """Progress of deliveries. ``sequence`` is the stream sequence number of the last event that was delivered or
    skipped; later events follow in order."""

    model_config = ConfigDict(frozen=True)

    sequence: int
    delivered: int = 0
    attempts: int = 0
    """Failed delivery attempts of the event after ``sequence``."""
    failing_since: datetime | None = None
    last_error: str = ""
    last_delivery_at: datetime | None = None


class WebhookRecord(BaseModel):
    """Webhook as returned by the API."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: str = "rl.webhook"
    url: str
    types: list[str]
    job: str | None = None
    description: str = ""
    enabled: bool = True
    disabled_reason: str = ""
    """Reason why the deployment disabled the webhook; events wait until a user enables the webhook again."""
    created_at: datetime


class StoredWebhook(WebhookRecord):
    """Webhook as stored, with its signing secret, which anyone with access to the bus's storage can read."""

    secret: str = Field(repr=False)

    def shown(self) -> WebhookRecord:
        """Return the record without the secret."""
        return WebhookRecord(**{name: getattr(self, name) for name in WebhookRecord.model_fields})

    def wants(self, type: str) -> bool:
        """Return True if the webhook subscribes to events of the type ``type``; ``*`` at the end of a subscription
        matches any ending."""
        return any(type == one or (one.endswith("*") and type.startswith(one[:-1])) for one in self.types)
