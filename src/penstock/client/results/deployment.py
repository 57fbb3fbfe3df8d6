"""Results about a deployment beside its jobs: keys, webhooks, files, graders' answers, audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

__all__ = [
    "AuditEntry",
    "CheckedGrader",
    "Code",
    "Deliveries",
    "File",
    "GraderRun",
    "Key",
    "NewKey",
    "NewWebhook",
    "RunMetadata",
    "Webhook",
    "WebhookState",
    "WebhookTrial",
]


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, never its text. ``models``: names or ids of the only jobs that it reaches, None: all."""

    id: str
    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None = None
    rate_limit: str | None = None
    models: list[str] | None = None
    max_weight: float = 1.0
    """Largest weight of its feedback."""
    code_modules: list[str] | None = None
    """With the scope jobs:code: modules whose functions its job files may name."""


class NewKey(Key, frozen=True, kw_only=True):
    """A key that was just made; its text is ``key``, shown this once. ``warnings``: what it does not reach yet."""

    key: str
    warnings: list[str] = []


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """Where events are posted, and which ones. ``disabled_reason``: why the deployment switched it off."""

    id: str
    url: str
    types: list[str]
    job: str | None = None
    description: str = ""
    enabled: bool = True
    disabled_reason: str = ""
    created_at: datetime


class NewWebhook(Webhook, frozen=True, kw_only=True):
    """A webhook that was just made; ``secret`` signs its deliveries and is shown this once."""

    secret: str


class Deliveries(msgspec.Struct, frozen=True, kw_only=True):
    """How far deliveries are: the last event that is done with, and what is wrong with the next one."""

    sequence: int
    delivered: int = 0
    attempts: int = 0
    failing_since: datetime | None = None
    last_error: str = ""
    last_delivery_at: datetime | None = None


class WebhookState(Webhook, frozen=True, kw_only=True):
    """A webhook and how far its deliveries are."""

    deliveries: Deliveries


class WebhookTrial(msgspec.Struct, frozen=True, kw_only=True):
    """True if the receiver took a test event; ``error``: why not."""

    delivered: bool
    error: str = ""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded data set: ``rows`` lines that hold a row. ``sha256`` in hex, ``created_at`` in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    sha256: str
    rows: int


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file of Python: job files name what is in it by ``NAME@SHA256:FUNCTION``."""

    sha256: str
    bytes: int


class CheckedGrader(msgspec.Struct, frozen=True, kw_only=True):
    """A grader that can be opened."""

    grader: dict[str, Any]


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """How the run of a grader went; ``execution_time`` in seconds."""

    name: str
    type: str
    errors: dict[str, bool | str | None]
    """Failures, by kind; false, or None, for none."""
    execution_time: float
    scores: dict[str, float]
    token_usage: int | None = None
    sampled_model_name: str | None = None

    @property
    def failures(self) -> dict[str, bool | str]:
        """The errors there were, and their details."""
        return {name: value for name, value in self.errors.items() if value}


class GraderRun(msgspec.Struct, frozen=True, kw_only=True):
    """The reward, 0 where there is an error; ``sub_rewards`` of the parts of a multi grader."""

    reward: float
    sub_rewards: dict[str, float]
    metadata: RunMetadata
    model_grader_token_usage_per_model: dict[str, int] = {}


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was allowed and may have changed something; ``key`` is the id of who sent it.

    ``request`` is the `x-request-id` of its reply, ``path`` holds what stands in the places of ``route``, users as
    pseudonyms. ``replayed``: an earlier request with its idempotency key was answered again.
    """

    id: int
    request: str
    time: float
    key: str
    key_name: str
    address: str
    method: str
    route: str
    path: dict[str, str]
    query: dict[str, str]
    status: int
    job: str
    location: str
    replayed: bool
    idempotency_key: str
    body_sha256: str
    trace: str
