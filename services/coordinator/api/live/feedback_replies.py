"""Replies about feedback: receipt, status, the counts of a job, consent and erasure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

__all__ = [
    "BatchReply",
    "ConsentReply",
    "ErasureReply",
    "FeedbackReply",
    "FeedbackStatusReply",
    "Funnel",
    "ItemReply",
    "RetractReply",
]


class FeedbackReply(BaseModel):
    """Receipt of an item that is on disk. ``stream_seq`` is null if the item spans several messages."""

    feedback_id: str
    status: Literal["accepted", "valid"]
    duplicate: bool
    target: Literal["known", "unknown_yet", "none"]
    job: str
    stream_seq: int | None
    href: str


class RetractReply(BaseModel):
    """Receipt of a retraction. ``too_late``: the job has already admitted the item to training, so the retraction
    changes only the record."""

    feedback_id: str
    retraction_id: str
    status: Literal["accepted"] = "accepted"
    duplicate: bool
    too_late: bool


class ItemReply(BaseModel):
    """One item of a batch: status 202 or 200 (dry run), or the problem document that the item alone would get."""

    index: int
    id: str | None
    status: int
    duplicate: bool = False
    problem: dict[str, Any] | None = None


class BatchReply(BaseModel):
    """All items of a batch, in order."""

    object: Literal["list"] = "list"
    data: list[ItemReply]
    accepted: int
    refused: int


class Trained(BaseModel):
    """The update (``step``) that trained on an item, and the policy version that it produced."""

    step: int
    version: int


class FeedbackStatusReply(BaseModel):
    """Status of an item of feedback."""

    object: Literal["feedback"] = "feedback"
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
    late_revision: int | None = Field(None, description="A revision that came too late: it has no effect")
    retraction_requested: bool = False
    received: float
    time: float


class FunnelRow(BaseModel):
    """Number of items with the same metric, source and status. The source is the key that posted the items. For items
    without a metric, ``metric`` is their kind."""

    metric: str
    source: str
    status: str
    items: int


class OutcomeRow(BaseModel):
    """Number of interactions whose decision has this status and reason; interactions without a decision are not
    counted."""

    status: str
    reason: str
    interactions: int


class Funnel(BaseModel):
    """Counts of a job's feedback by metric, source and status; see ``FunnelRow``.

    ``interactions`` counts the decisions on the interactions themselves, including those without feedback.
    """

    object: Literal["feedback.funnel"] = "feedback.funnel"
    job: str
    items: int
    by_status: dict[str, int]
    data: list[FunnelRow]
    interactions: list[OutcomeRow] = []


class ConsentReply(BaseModel):
    """Stored consent of a user."""

    user: str = Field(description="Pseudonym of the user in stored data")
    train: bool


class ErasureReply(BaseModel):
    """Deletion of a user's data: its progress, and the policy versions that were trained on the data (these are not
    deleted)."""

    user: str = Field(description="Pseudonym of the user in stored data")
    status: Literal["running", "done"]
    interactions: int
    feedback: int
    groups: int
    episodes: int = Field(0, description="Episodes opened for the user; they accept no more requests")
    trained_versions: dict[str, list[int]] = Field(description="By job: versions that were trained on it; they stay")
    requested: float
    finished: float | None = None
