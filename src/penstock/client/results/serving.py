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
    """Output tokens [start, end) were sampled from policy ``version``."""

    version: int
    start: int
    end: int


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that the model wrote; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


class Redacted(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, stop) of the `prompt` or the `completion` that were blanked, and what they were."""

    part: str
    start: int
    stop: int
    name: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an interaction: `admitted`, `trained`, or `rejected` for ``reason``."""

    status: str
    reason: str
    ordinal: int | None = None
    trained: Trained | None = None
    time: float


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one choice that was served. ``decision`` is None while nothing is decided about it.

    ``token_ids`` and ``logprobs`` (of the sampler, natural logarithm) are equally long, ``spans`` cover them.
    ``untrainable`` says why it may not be trained on; empty where it may. ``user`` and ``tags["user_id"]`` are
    pseudonyms; ``sampling`` holds the parameters by name.
    """

    id: str
    request: str
    index: int
    job: str
    episode: str
    alone: bool = False
    """Its request named no episode."""
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
    """The field of the request that prescribed the form of the answer: `response_format`, `tool_choice`, or empty."""
    finish: str
    template: str
    """Digest of tokenizer and chat template."""
    body_digest: str
    text: str
    prompt: str = ""
    """As the policy read it; empty where the record would not hold it."""
    tool_calls_valid: bool | None = None
    calls: list[ToolCall] = []
    tags: dict[str, str] = {}
    redacted: list[Redacted] = []
    started: float
    first_token: float
    ended: float
    decision: Decision | None = None
    decision_known: bool = True
    """False while the server's index of decisions is built anew: ``decision`` says nothing then."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was opened. ``base_url`` is where a client of OpenAI's API speaks in it."""

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
    """An episode that was just opened; ``api_key`` is its key where one was asked for, shown this once."""

    api_key: str | None = None
    api_key_expires_at: datetime | None = None


class EpisodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key for one episode alone, shown this once."""

    key: str
    episode: str
    base_url: str
    scopes: list[str]
    expires_at: datetime


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A job that trains or a deployment, under its name; or a checkpoint that is deployed when it is asked for.

    ``promoted_at``: since when that version is served, with a promotion gate; ``checkpoint``: what a deployment serves.
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
    """The newest checkpoint of a version, and whether its files are on the coordinator's host."""

    number: int
    time: float
    available: bool


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version of a model, the one that is served, or one that it can go back to."""

    version: int
    served: bool
    newest: bool
    checkpoint: KeptCheckpoint | None = None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A version on trial: its share of the conversations, since when, and what was said of both arms."""

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
    """Which version of a job is the newest, which one is served, and which one is on trial."""

    newest: int
    served: int
    canary: Trial | None = None
