"""Results about feedback: receipts, status, counts of a job, feedback tokens, consent and erasure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

__all__ = [
    "Accepted",
    "Consent",
    "Erasure",
    "FeedbackStatus",
    "FeedbackToken",
    "Funnel",
    "FunnelRow",
    "HeldItem",
    "HeldRow",
    "ItemReply",
    "OutcomeRow",
    "Retracted",
    "Trained",
    "Verdict",
]


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """Receipt of a feedback item. The item is on disk, except after a dry run (``status`` `valid`).

    ``target``: `known` if the server knows the response or episode that the item is about, otherwise `unknown_yet`;
    `none` if the item is about neither. ``duplicate``: the item was posted before.
    """

    feedback_id: str
    status: str
    duplicate: bool
    target: str
    job: str
    stream_seq: int | None = None
    href: str = ""


class ItemReply(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one item of a batch. ``status``: 202, or 200 in a dry run, or the HTTP status of the ``problem``."""

    index: int
    id: str | None
    status: int
    duplicate: bool = False
    problem: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True if the item was accepted."""
        return self.problem is None


class Retracted(msgspec.Struct, frozen=True, kw_only=True):
    """Receipt of a retraction. ``too_late``: the item was already admitted or trained, which is not undone."""

    feedback_id: str
    retraction_id: str
    status: str = "accepted"
    duplicate: bool
    too_late: bool


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The update (``step``) that trained on an item or interaction, and the resulting policy version."""

    step: int
    version: int


class FeedbackStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of an item of feedback.

    ``status``: received, matched, admitted, quarantined, rejected, expired, retracted, trained. ``ordinal``: position
    of its trajectory in the job's data order, once admitted. ``late_revision``: a revision that arrived after the
    decision and has no effect.
    """

    feedback_id: str
    job: str
    kind: str
    metric: str
    status: str
    reason: str = ""
    interactions: list[str] = []
    ordinal: int | None = None
    trained: Trained | None = None
    revision: int = 0
    late_revision: int | None = None
    retraction_requested: bool = False
    received: float
    time: float


class FunnelRow(msgspec.Struct, frozen=True, kw_only=True):
    """Number of items with this metric (or kind), source (the key that posted them) and status."""

    metric: str
    source: str
    status: str
    items: int


class OutcomeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Number of interactions whose decision has this status and reason; undecided interactions are not counted."""

    status: str
    reason: str
    interactions: int


class Funnel(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a job's feedback. ``interactions`` counts the decisions on all interactions, with and without
    feedback."""

    job: str
    items: int
    by_status: dict[str, int]
    data: list[FunnelRow]
    interactions: list[OutcomeRow] = []


class FeedbackToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token for one verdict, which is posted to ``url`` as the item ``feedback_id``. The token is not shown again."""

    token: str
    feedback_id: str
    metric_name: str
    url: str
    expires_at: datetime


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """Consent of a user; ``user`` is the pseudonym."""

    user: str
    train: bool


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the deletion of a user's data (``status``: `running` or `done`), with the numbers of deleted items.

    ``trained_versions``: by job, versions that were trained on the data; they stay.
    """

    user: str
    status: str
    interactions: int
    feedback: int
    groups: int
    episodes: int = 0
    trained_versions: dict[str, list[int]]
    requested: float
    finished: float | None = None


class HeldRow(msgspec.Struct, frozen=True, kw_only=True):
    """A quarantined item: arrival (``received``) and quarantine time (``time``) in Unix seconds, and the reason."""

    feedback_id: str
    job: str
    metric: str
    source: str
    reason: str
    received: float
    time: float


class HeldItem(HeldRow, frozen=True, kw_only=True):
    """A quarantined item with its value and its target, a response or an episode."""

    value: bool | float | str | None
    target: str
    weight: float
    user: str
    revision: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """An administrator's recorded decision on a quarantined item; ``verdict`` is `release` or `drop`."""

    feedback_id: str
    verdict: str
    status: str
    duplicate: bool
