"""Feedback: taken, its fate, the funnel of a job; tokens for one verdict, consent and erasure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

__all__ = [
    "Accepted",
    "Consent",
    "Erasure",
    "Fate",
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
    """An item of feedback that is on disk (``status`` `valid`: a dry run, it is not).

    ``target``: `known`, `unknown_yet`, or `none` where it has none; ``duplicate``: it had been posted before.
    """

    feedback_id: str
    status: str
    duplicate: bool
    target: str
    job: str
    stream_seq: int | None = None
    href: str = ""


class ItemReply(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a batch: ``status`` 202 (200: a dry run), or what it was refused with, and the ``problem``."""

    index: int
    id: str | None
    status: int
    duplicate: bool = False
    problem: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True if it was taken."""
        return self.problem is None


class Retracted(msgspec.Struct, frozen=True, kw_only=True):
    """An item that was taken back. ``too_late``: it had been trained on; only the record says so now."""

    feedback_id: str
    retraction_id: str
    status: str = "accepted"
    duplicate: bool
    too_late: bool


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The update (``step``) that something was trained in, and the version that it made."""

    step: int
    version: int


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an item of feedback.

    ``status``: received, matched, admitted, quarantined, rejected, expired, retracted, trained. ``ordinal``: the place
    of its trajectory in the job's data order, once admitted. ``late_revision``: came when the item was decided, and has
    no effect.
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
    """So many items of one metric (or kind) from one source, the key that posted them, have one status."""

    metric: str
    source: str
    status: str
    items: int


class OutcomeRow(msgspec.Struct, frozen=True, kw_only=True):
    """So many interactions were decided like this."""

    status: str
    reason: str
    interactions: int


class Funnel(msgspec.Struct, frozen=True, kw_only=True):
    """The feedback of a job, counted; ``interactions``: what became of the answers, those without feedback too."""

    job: str
    items: int
    by_status: dict[str, int]
    data: list[FunnelRow]
    interactions: list[OutcomeRow] = []


class FeedbackToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token for one verdict, shown this once; ``feedback_id``: the item that it becomes, at ``url``."""

    token: str
    feedback_id: str
    metric_name: str
    url: str
    expires_at: datetime


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """Consent of a user (a pseudonym)."""

    user: str
    train: bool


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """How far the deletion of a user's data is (``status`` `running` or `done`), and how much was deleted.

    ``trained_versions``: by job, versions that were trained on it; they stay.
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
    """An item that is held back: when it came, since when it is held (``time``, Unix seconds) and why."""

    feedback_id: str
    job: str
    metric: str
    source: str
    reason: str
    received: float
    time: float


class HeldItem(HeldRow, frozen=True, kw_only=True):
    """With what it says of which response or episode (``target``)."""

    value: bool | float | str | None
    target: str
    weight: float
    user: str
    revision: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Decision about an item that is held: ``verdict`` is `release` or `drop`, and it is on disk."""

    feedback_id: str
    verdict: str
    status: str
    duplicate: bool
