"""Models of the replies, for the OpenAPI document and for clients."""

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
    "ConnectionLimits",
    "DocumentLimits",
    "DryRun",
    "EventList",
    "FeedbackLimits",
    "Health",
    "JobList",
    "KeyLimits",
    "Limits",
    "LogLines",
    "ReplayRequest",
    "RowList",
    "Version",
]


class JobList(BaseModel):
    """One page of jobs; ``after=last_id`` gets the next page."""

    object: Literal["list"] = "list"
    data: list[JobRecord]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class RowList(BaseModel):
    """List of rows, whose fields depend on the route."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    has_more: bool = False


class HeldOut(BaseModel):
    """Newest evaluation on held-out episodes; ``step`` is the number of updates before it."""

    step: int
    version: int
    values: dict[str, float | None] = Field(description="`eval/success`, `eval/return`, `eval/length`")


class SampleList(RowList):
    """Samples; ``videos`` contains the addresses of videos of held-out episodes."""

    videos: list[str] = []
    held_out: HeldOut | None = Field(None, description="Of an embodied job; null before its first evaluation")


class EventList(RowList):
    """Events; ``id`` of a row is its sequence number."""

    first_id: int | None = None
    last_id: int | None = None


class Columns(BaseModel):
    """Metrics by column; all lists have the same length."""

    steps: list[int]
    wall: list[float]
    series: dict[str, list[float | None]]


class CheckpointFile(BaseModel):
    """One file of a checkpoint; ``sha256`` in hex."""

    name: str
    nbytes: int
    sha256: str


class CheckpointRow(BaseModel):
    """A checkpoint. ``available``: its files can be downloaded here; ``reason``: the cause of the checkpoint."""

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
        description="hf: whole weights for from_pretrained; lora: an adapter for peft; null if there are no files"
    )
    nbytes: int
    files: list[CheckpointFile]


class CheckpointList(BaseModel):
    """The checkpoints of a job, oldest first."""

    object: Literal["list"] = "list"
    data: list[CheckpointRow]
    has_more: bool = False


class Audit(BaseModel):
    """Audit of a ledger: the equation drawn = trained + dropped + in flight, all checks, and the violations."""

    ok: bool
    equation: dict[str, Any] = {}
    checks: list[dict[str, Any]] = []
    violations: list[str] = []


class DryRun(BaseModel):
    """Effects that a submission would have."""

    valid: Literal[True] = True
    plan: dict[str, Any]


class LogLines(BaseModel):
    """Log lines; pass ``next`` as ``after`` to get the lines that follow."""

    lines: list[dict[str, Any]]
    next: str | None = None


class ReplayRequest(BaseModel):
    """Range of sealed batches to replay; default: all that can be replayed."""

    model_config = {"extra": "forbid"}

    from_batch: int | None = Field(None, ge=0, lt=1 << 53)
    to_batch: int | None = Field(None, ge=0, lt=1 << 53)
    feedback: bool = Field(False, description="Add to each row `admissions`: the answers and feedback of its batch")


class Health(BaseModel):
    """Readiness and its checks."""

    ok: bool
    checks: dict[str, Any] = {}


class Version(BaseModel):
    """Versions of the build, the API and the message schema."""

    version: str
    api: Literal["v1"] = "v1"
    schema_number: int


class FeedbackLimits(BaseModel):
    """Limits of feedback; the limits of texts and tags are in characters."""

    max_item_bytes: int = Field(description="Bytes of an item other than a whole interaction")
    max_interaction_bytes: int
    max_interaction_tokens: int = Field(description="Prompt and completion together")
    max_episode_turns: int = Field(description="Turns of one episode; later ones are recorded and never trained on")
    max_batch_bytes: int
    max_batch_items: int
    max_tags: int
    max_tag_key: int
    max_tag_value: int
    max_comment: int = Field(description="Characters of `comment` beside a value, and of the metric `comment`")
    max_text: int = Field(description="Characters of a demonstration, and of a preferred answer, as text")
    token_min_s: float = Field(description="Shortest life of a token for one verdict")
    token_default_s: float
    token_max_s: float


class ConnectionLimits(BaseModel):
    """Limits of connections, which apply before authentication."""

    max_connections: int = Field(
        description="Connections of all clients, fewer if file descriptors are short; 503 `too_many_connections` beyond"
    )
    max_per_address: int = Field(
        description="Connections of one client address (IPv6: of a /64); 503 `too_many_connections` beyond"
    )
    max_head_bytes: int = Field(description="Bytes of the request line with all headers; 431 beyond")
    max_headers: int = Field(description="Lines of headers; 431 beyond")
    head_s: float = Field(description="Seconds that a connection may be silent, or take for its headers; 408 beyond")
    body_s: float = Field(description="Seconds for a body, plus one for each `body_bytes_per_s`; 408 beyond")
    body_bytes_per_s: int


class KeyLimits(BaseModel):
    """Limits of one key, shared by the episode keys and tokens that it created."""

    max_requests_at_once: int = Field(
        description="Event streams and long polls included; 429 `too_many_at_once` beyond"
    )
    max_large_bodies: int = Field(description="Bodies above `max_body_bytes` that are read at once; others wait")
    max_large_bodies_of_all: int = Field(description="The same for all keys together")
    large_body_wait_s: float = Field(description="Seconds of such a wait; 429 `too_many_large_bodies` beyond")
    max_requests_of_model: int = Field(
        description="Requests of all keys to one model of a coordinator; a key gets as many as are free; "
        "429 `capacity` beyond"
    )
    tenant_share: float = Field(
        description="Share of a key in opened episodes (507 `episode_quota`), and of a job in stored feedback (429 "
        "`job_backlog_full`), of the part that the others leave"
    )
    key_share: float = Field(
        description="Share of a key in the feedback of one job, of the part that its other keys leave"
    )


class DocumentLimits(BaseModel):
    """Limits of the content of a body; a body beyond them gets 422 `too_complex`."""

    max_values: int = Field(
        description="Values of a JSON body; a posted interaction may have as many as its tokens need"
    )
    max_yaml_values: int
    max_depth: int
    max_schema_bytes: int = Field(description="Bytes of all schemas of a request together")
    max_tools: int = Field(description="Schemas of a request for an answer of a given form")
    max_choices: int = Field(description="Answers of one request: prompts times `n`")


class Limits(BaseModel):
    """Limits of the API, and guarantees of this deployment."""

    model_config = {"extra": "allow"}

    max_body_bytes: int
    max_large_body_bytes: int = Field(description="Routes for conversations, whole interactions and batches")
    max_file_bytes: int = Field(description="Bytes of an upload to /v1/files")
    max_batch_items: int
    feedback: FeedbackLimits
    max_page: int
    max_wait_s: float
    rate_limit: str
    live_rate_limit: str = Field(description="Requests to models, and feedback, counted separately")
    user_rate_limit: str | None = Field(description="Live requests and feedback of a key for one end user")
    token_rate_limit: str | None = Field(description="Tokens of prompts and answers of one key")
    address_rate_limit: str | None = Field(description="Requests of one client address (IPv6: of a /64)")
    connections: ConnectionLimits
    per_key: KeyLimits
    documents: DocumentLimits
    max_files: int = Field(description="Uploaded data sets of all keys")
    files_bytes: int = Field(description="Bytes of all uploaded data sets together")
    max_webhooks: int
    idempotency_keep_s: int
    authentication: bool
