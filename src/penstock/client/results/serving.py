"""Results about serving: interactions and their decisions, episodes and their keys, models and their versions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from penstock.client.results.feedback import Trained

__all__ = [
    "Decision",
    "Episode",
    "EpisodeKey",
    "Interaction",
    "KeptCheckpoint",
    "Model",
    "ModelVersion",
    "NewEpisode",
    "Redacted",
    "Span",
    "ToolCall",
    "Trial",
    "Versions",
]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) that policy ``version`` sampled."""

    version: int
    start: int
    end: int


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """A tool call of the model; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


class Redacted(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, stop) of the `prompt` or the `completion` that were redacted, and the kind of their content."""

    part: str
    start: int
    stop: int
    name: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision on an interaction: `admitted`, `trained`, or `rejected` for ``reason``."""

    status: str
    reason: str
    ordinal: int | None = None
    trained: Trained | None = None
    time: float


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one answer: an entry of ``choices`` in a response. ``decision`` is None until the job admits or rejects
    the interaction.

    ``token_ids`` and ``logprobs`` (of the sampler, natural logarithm) have the same length; ``spans`` cover them.
    ``untrainable`` is the reason why it must not be trained on, or empty. ``user`` and ``tags["user_id"]`` are
    pseudonyms; ``sampling`` holds the parameters by name.
    """

    id: str
    request: str
    index: int
    job: str
    episode: str
    alone: bool = False
    """True if the request named no episode."""
    key_id: str
    user: str
    split: str
    untrainable: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    sampling: dict[str, Any]
    constraint: str = ""
    """Request field that constrained the answer: `response_format`, `tool_choice`, or empty."""
    finish: str
    template: str
    """Digest of tokenizer and chat template."""
    body_digest: str
    text: str
    prompt: str = ""
    """Prompt text as the policy read it; empty if it was too long for the record."""
    tool_calls_valid: bool | None = None
    calls: list[ToolCall] = []
    tags: dict[str, str] = {}
    redacted: list[Redacted] = []
    started: float
    first_token: float
    ended: float
    decision: Decision | None = None
    decision_known: bool = True
    """False while the server rebuilds its index of decisions; ``decision`` has no meaning then."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """An opened episode. ``base_url`` is its address for a client of OpenAI's API."""

    id: str
    job: str
    model: str
    key_id: str
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None
    split: str = "train"
    group_id: str | None = None
    user: str = ""
    tags: dict[str, str] = {}
    base_url: str


class NewEpisode(Episode, frozen=True, kw_only=True):
    """A new episode. ``api_key`` is its key, if one was requested, and is not shown again."""

    api_key: str | None = None
    api_key_expires_at: datetime | None = None


class EpisodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that is valid for one episode only; ``key`` is not shown again."""

    key: str
    episode: str
    base_url: str
    scopes: list[str]
    expires_at: datetime


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A training job or serving job, under its name; or a checkpoint, for which the first request starts a serving job.

    ``promoted_at``: time of the promotion of ``policy_version`` (Unix seconds), for a job with a promotion gate.
    ``checkpoint``: the served checkpoint. ``served``: False: the first request loads the model.
    """

    id: str
    created: int
    owned_by: str = ""
    job: str
    online: bool
    policy_version: int
    promoted_at: int | None = None
    served: bool = True
    checkpoint: str | None = None


class KeptCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint of a version; ``available``: its files are on the coordinator's host."""

    number: int
    time: float
    available: bool


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model: the newest version, the served version, or a version that the model can roll back to."""

    version: int
    served: bool
    newest: bool
    checkpoint: KeptCheckpoint | None = None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Trial of a canary ``version`` against the served version: its share of the conversations, and feedback on both.

    ``since``: start (Unix seconds); ``until``: latest end (Unix seconds).
    ``needed``: judged conversations that each version needs for a decision.
    """

    version: int
    served_version: int
    share: float
    since: float
    until: float
    needed: int
    conversations: int
    reward: float | None = None
    served_conversations: int
    served_reward: float | None = None


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version of a job, the served version, and the canary version (None if there is none)."""

    newest: int
    served: int
    canary: Trial | None = None
