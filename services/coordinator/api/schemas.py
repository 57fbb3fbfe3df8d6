"""Shapes of the replies, for the OpenAPI document and for clients."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from penstock.shared.protocol.jobs import JobRecord

__all__ = [
    "Audit",
    "CheckpointFile",
    "CheckpointList",
    "CheckpointRow",
    "Columns",
    "DryRun",
    "EventList",
    "FeedbackLimits",
    "Health",
    "JobList",
    "Limits",
    "LogLines",
    "ReplayRequest",
    "RowList",
    "Version",
]


class JobList(BaseModel):
    """One page of jobs; ``after=last_id`` gets the next."""

    object: Literal["list"] = "list"
    data: list[JobRecord]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class RowList(BaseModel):
    """Rows of workers, samples or waits."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    has_more: bool = False


class SampleList(RowList):
    """Samples; ``videos`` are the addresses of films of held-out episodes, if there are any."""

    videos: list[str] = []


class EventList(RowList):
    """Events; each row has ``id``, its place in the order."""

    first_id: int | None = None
    last_id: int | None = None


class Columns(BaseModel):
    """Metrics by column: all lists are equally long."""

    steps: list[int]
    wall: list[float]
    series: dict[str, list[float | None]]


class CheckpointFile(BaseModel):
    """One file; ``sha256`` in hex."""

    name: str
    nbytes: int
    sha256: str


class CheckpointRow(BaseModel):
    """A checkpoint. ``available``: its files can be downloaded here; ``reason``: why it was taken."""

    number: int = Field(description="Batches trained before it")
    version: int
    digest: str
    path: str
    time: float
    reason: str
    initial: bool
    best: bool
    newest: bool
    final: bool
    available: bool
    format: Literal["hf", "lora"] | None = Field(
        description="hf: whole weights for from_pretrained; lora: an adapter, for peft; null where no files are here"
    )
    nbytes: int
    files: list[CheckpointFile]


class CheckpointList(BaseModel):
    """The checkpoints of a job, oldest first."""

    object: Literal["list"] = "list"
    data: list[CheckpointRow]
    has_more: bool = False


class Audit(BaseModel):
    """The ledger equation and every check on it."""

    ok: bool
    equation: dict[str, Any] = {}
    checks: list[dict[str, Any]] = []
    violations: list[str] = []


class DryRun(BaseModel):
    """Effects of a submission."""

    valid: Literal[True] = True
    plan: dict[str, Any]


class LogLines(BaseModel):
    """Lines of logs; pass ``next`` as ``after`` to get what follows."""

    lines: list[dict[str, Any]]
    next: str | None = None


class ReplayRequest(BaseModel):
    """Which sealed batches to repeat; default: all that can be."""

    model_config = {"extra": "forbid"}

    from_batch: int | None = Field(None, ge=0, lt=1 << 53)
    to_batch: int | None = Field(None, ge=0, lt=1 << 53)
    feedback: bool = Field(False, description="Rows say by `told` which answers a batch trained, by which feedback")


class Health(BaseModel):
    """Readiness and what it depends on."""

    ok: bool
    checks: dict[str, Any] = {}


class Version(BaseModel):
    """Versions of the build, the API and the wire."""

    version: str
    api: Literal["v1"] = "v1"
    schema_number: int


class FeedbackLimits(BaseModel):
    """Limits of feedback; texts and tags in characters."""

    max_item_bytes: int = Field(description="Of an item that is no whole interaction")
    max_interaction_bytes: int
    max_interaction_tokens: int = Field(description="Prompt and completion together")
    max_episode_turns: int = Field(description="Of one episode; later turns are recorded and never trained on")
    max_batch_bytes: int
    max_batch_items: int
    max_tags: int
    max_tag_key: int
    max_tag_value: int
    max_comment: int = Field(description="Of `comment` beside a value, and of the metric `comment`")
    max_text: int = Field(description="Of a demonstration, and of an answer that is preferred to another, as text")
    token_min_s: float = Field(description="Shortest life of a token for one verdict")
    token_default_s: float
    token_max_s: float


class Limits(BaseModel):
    """Limits of the API, and guarantees of this deployment."""

    model_config = {"extra": "allow"}

    max_body_bytes: int
    max_large_body_bytes: int = Field(description="Where conversations, whole interactions and batches are posted")
    max_file_bytes: int = Field(description="Of an upload to /v1/files")
    max_batch_items: int
    feedback: FeedbackLimits
    max_page: int
    max_wait_s: float
    rate_limit: str
    live_rate_limit: str = Field(description="Of models and feedback, counted apart")
    user_rate_limit: str | None = Field(description="Of live requests and feedback of a key for one end user")
    address_rate_limit: str | None = Field(description="Of one client address; IPv6: of a /64")
    idempotency_keep_s: int
    authentication: bool
