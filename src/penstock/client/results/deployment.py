"""Results about a deployment besides its jobs: keys, webhooks, files, results of graders, audit log."""

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
    """An API key without its text. ``models``: names or ids of the jobs that the key may access (None: all jobs)."""

    id: str
    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None = None
    rate_limit: str | None = None
    models: list[str] | None = None
    max_weight: float = 1.0
    """Maximum weight of feedback that this key posts."""
    code_modules: list[str] | None = None
    """With the scope jobs:code: modules whose functions its job files may name."""


class NewKey(Key, frozen=True, kw_only=True):
    """A new key; its text ``key`` is not shown again. ``warnings`` are about ``models`` that do not exist yet."""

    key: str
    warnings: list[str] = []


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """Address that receives events, and their types. ``disabled_reason``: the reason why the deployment disabled it."""

    id: str
    url: str
    types: list[str]
    job: str | None = None
    description: str = ""
    enabled: bool = True
    disabled_reason: str = ""
    created_at: datetime


class NewWebhook(Webhook, frozen=True, kw_only=True):
    """A new webhook; ``secret`` signs its deliveries and is not shown again."""

    secret: str


class Deliveries(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of deliveries.

    ``sequence``: stream sequence number of the last event that was delivered or skipped; ``attempts``,
    ``failing_since`` and ``last_error``: failed attempts to deliver the next one.
    """

    sequence: int
    delivered: int = 0
    attempts: int = 0
    failing_since: datetime | None = None
    last_error: str = ""
    last_delivery_at: datetime | None = None


class WebhookState(Webhook, frozen=True, kw_only=True):
    """A webhook and the progress of its deliveries."""

    deliveries: Deliveries


class WebhookTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a test event. ``delivered``: True if the receiver accepted it, otherwise ``error`` has the reason."""

    delivered: bool
    error: str = ""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded data set of ``rows`` rows, or a model. ``sha256`` in hex, ``created_at`` in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    sha256: str
    rows: int


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded Python file; job files refer to its functions by ``NAME@SHA256:FUNCTION``."""

    sha256: str
    bytes: int


class CheckedGrader(msgspec.Struct, frozen=True, kw_only=True):
    """Reply about a valid grader; a reward worker has loaded it successfully."""

    grader: dict[str, Any]


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of the run of a grader; ``execution_time`` in seconds."""

    name: str
    type: str
    errors: dict[str, bool | str | None]
    """By kind of failure: True or details of the failure; False or None if no failure of this kind occurred."""
    execution_time: float
    scores: dict[str, float]
    token_usage: int | None = None
    sampled_model_name: str | None = None

    @property
    def failures(self) -> dict[str, bool | str]:
        """Errors that occurred, and their details."""
        return {name: value for name, value in self.errors.items() if value}


class GraderRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a grader: its reward (0 after an error). ``sub_rewards``: rewards of the parts of a multi grader."""

    reward: float
    sub_rewards: dict[str, float]
    metadata: RunMetadata
    model_grader_token_usage_per_model: dict[str, int] = {}


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One authorized request that may have changed something; ``key`` is the id of the key of its sender.

    ``request`` is the `x-request-id` of its reply, ``path`` holds the path parameters of ``route``, with users as
    pseudonyms. ``replayed``: the reply to an earlier request with the same idempotency key was sent again.
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
