"""A webhook: where events go, which ones, and how far it is; as stored and as the API shows it."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DEFAULT_TYPES", "DeliveryState", "StoredWebhook", "WebhookRecord"]

DEFAULT_TYPES = ("rl.job.succeeded.v1", "rl.job.failed.v1", "rl.job.cancelled.v1")


class DeliveryState(BaseModel):
    """How far deliveries are. ``sequence``: the last event that is done with; later ones follow in their order."""

    model_config = ConfigDict(frozen=True)

    sequence: int
    delivered: int = 0
    attempts: int = 0
    """Failed attempts of the event after ``sequence``."""
    failing_since: datetime | None = None
    last_error: str = ""
    last_delivery_at: datetime | None = None


class WebhookRecord(BaseModel):
    """A webhook as people see it."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: str = "rl.webhook"
    url: str
    types: list[str]
    job: str | None = None
    description: str = ""
    enabled: bool = True
    disabled_reason: str = ""
    """Why the deployment switched it off; events wait until somebody enables it again."""
    created_at: datetime


class StoredWebhook(WebhookRecord):
    """With the secret, which signs; whoever may read the bus's storage can read it."""

    secret: str = Field(repr=False)

    def shown(self) -> WebhookRecord:
        """Without the secret."""
        return WebhookRecord(**{name: getattr(self, name) for name in WebhookRecord.model_fields})

    def wants(self, type: str) -> bool:
        """True if events of a type go there; a trailing ``*`` stands for any ending."""
        return any(type == one or (one.endswith("*") and type.startswith(one[:-1])) for one in self.types)
