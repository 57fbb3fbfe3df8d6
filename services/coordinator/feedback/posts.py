"""Request bodies of feedback, and the tags of requests, episodes and feedback."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    StringConstraints,
    Tag,
    TypeAdapter,
    model_validator,
)

from penstock.shared.protocol.live.interaction import MAX_TURNS, USER_TAG

__all__ = [
    "KIND_TAGS",
    "MAX_COMMENT",
    "MAX_ITEMS",
    "MAX_TAGS",
    "MAX_TAG_KEY",
    "MAX_TAG_VALUE",
    "MAX_TEXT",
    "MAX_TOKENS",
    "POST",
    "POSTS",
    "ConsentBody",
    "Correction",
    "FeedbackBodies",
    "FeedbackBody",
    "FeedbackPost",
    "Metric",
    "MetricByEpisode",
    "MetricByInference",
    "PostedInteraction",
    "PostedPreference",
    "Preference",
    "TagKey",
    "TagValue",
    "Tags",
    "is_number",
]

MAX_ITEMS = 256
"""Maximum number of items in one batch."""
MAX_TOKENS = 131_072
"""Maximum number of tokens in one posted interaction, prompt and completion together."""
MAX_COMMENT, MAX_TEXT = 8192, 1 << 17
"""Maximum number of characters in a comment, and in a demonstration or an answer that is a text."""
MAX_TAGS, MAX_TAG_KEY, MAX_TAG_VALUE = 16, 64, 512
"""Maximum number of tags of one request, episode or item of feedback, and of characters in a tag's key and value."""
LOGPROB_SLACK = 1e-6
"""Amount by which rounding may lift a log-probability above 0."""

_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
InferenceId = Annotated[StrictStr, StringConstraints(pattern=rf"^(chatcmpl-|cmpl-)?{_UUID}$")]
EpisodeId = Annotated[StrictStr, StringConstraints(pattern=rf"^(ep_)?{_UUID}$")]
FeedbackId = Annotated[StrictStr, StringConstraints(pattern=rf"^(fb_)?{_UUID}$")]
MetricName = Annotated[StrictStr, StringConstraints(min_length=1, max_length=64)]
Text = Annotated[StrictStr, StringConstraints(max_length=MAX_COMMENT)]
User = Annotated[StrictStr, StringConstraints(min_length=1, max_length=256)]
Finite = Annotated[StrictFloat, Field(allow_inf_nan=False)]
Verdict = StrictBool | Finite
TagKey = Annotated[StrictStr, StringConstraints(min_length=1, max_length=MAX_TAG_KEY)]
TagValue = Annotated[StrictStr, StringConstraints(max_length=MAX_TAG_VALUE)]
Tags = Annotated[dict[TagKey, TagValue], Field(max_length=MAX_TAGS)]
Token = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


def _storable(message: dict[str, Any]) -> dict[str, Any]:
    """Return ``message``. Raises ValueError for an integer beyond 64 bits, which Python parses but the storage format
    cannot hold."""
    open_ones: list[Any] = [message]
    while open_ones:
        value = open_ones.pop()
        if isinstance(value, dict | list):
            open_ones.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise ValueError("an integer in it does not fit in 64 bits")
    return message


Message = Annotated[dict[str, Any], AfterValidator(_storable)]
Messages = Annotated[list[Message], Field(fail_fast=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Answer = Annotated[StrictStr, StringConstraints(min_length=1, max_length=MAX_TEXT)] | Message
ModelName = Annotated[StrictStr, StringConstraints(min_length=1, max_length=128)]


class _Post(BaseModel):
    """Fields of every kind of feedback."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    feedback_id: FeedbackId | None = Field(None, description="Chosen by the sender: the same id has one effect")
    revision: StrictInt = Field(0, ge=0, lt=1 << 31, description="A higher one replaces what the id said before")
    tags: Tags = Field(default_factory=dict)
    observed_at: AwareDatetime | None = Field(None, strict=True, description="Time of the observation (RFC 3339)")
    user: User | None = Field(None, description="User who judged; stored only as a pseudonym. Also: tags.user_id")

    @property
    def named_user(self) -> str:
        """Name of the user who gave the feedback, as the sender states it; '' if the sender states none."""
        return self.user or self.tags.get(USER_TAG, "")


class Metric(_Post):
    """Feedback that gives the value of a metric, or a text (comment or demonstration)."""

    metric_name: MetricName = Field(description="A metric that the job declares, reward, comment or demonstration")
    value: Verdict | Annotated[StrictStr, StringConstraints(max_length=MAX_TEXT)] | Message | Messages
    weight: Finite = Field(1.0, ge=0, le=1)
    final: StrictBool = False
    turn: StrictInt = Field(-1, ge=-1, lt=1 << 31, description="Turn of the episode; -1: the last")
    comment: Text | None = None
    dryrun: StrictBool | None = Field(None, description="Validate only")
    internal: StrictBool | None = Field(None, description="Ignored; TensorZero's client sends it")


class MetricByInference(Metric):
    """Value of a metric for one response."""

    inference_id: InferenceId
    episode_id: None = None


class MetricByEpisode(Metric):
    """Value of a metric for an episode, or for one turn of the episode."""

    inference_id: None = None
    episode_id: EpisodeId


class PostedSampling(BaseModel):
    """Sampling settings of the tokens of a posted interaction."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Finite = Field(1.0, ge=0, le=100)
    top_p: Finite = Field(1.0, gt=0, le=1)
    top_k: StrictInt = Field(0, ge=0, lt=1 << 31)


class PostedInteraction(_Post):
    """A whole interaction of an agent that Penstock does not serve."""

    kind: Literal["interaction"]
    model: ModelName = Field(description="Name or id of the online job")
    policy_version: StrictInt | None = Field(None, ge=0, lt=1 << 53)
    messages: Messages = Field(default_factory=list, max_length=4096)
    completion: Message | None = None
    prompt_token_ids: Tokens | None = Field(None, max_length=MAX_TOKENS)
    token_ids: Tokens | None = Field(None, min_length=1, max_length=MAX_TOKENS)
    logprobs: Annotated[list[Finite], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOKENS)
    sampling: PostedSampling = PostedSampling()
    tokenizer_sha: Annotated[StrictStr, StringConstraints(max_length=128)] | None = None
    group_id: Annotated[StrictStr, StringConstraints(min_length=1, max_length=128)] | None = None
    episode_id: EpisodeId | None = Field(None, description="Episode of which it is a turn, of the same key")
    turn: StrictInt = Field(
        -1, ge=-1, lt=MAX_TURNS, description="Index of the turn in its episode, from 0; -1: after the earlier ones"
    )
    reward: Verdict | None = None
    rewards: dict[MetricName, Verdict] = Field(
        default_factory=dict, max_length=64, description="Values of metrics, as the job declares them"
    )
    done: StrictBool | None = Field(
        None, description="True: the last turn of its episode; default: true only without an episode"
    )

    @model_validator(mode="after")
    def _tokens_fit(self) -> PostedInteraction:
        if self.token_ids is None and self.completion is None:
            raise ValueError("an interaction needs a completion, or token_ids and prompt_token_ids")
        if self.token_ids is not None and self.prompt_token_ids is None:
            raise ValueError("prompt_token_ids: token_ids need the prompt's, too")
        count = len(self.token_ids or ())
        if self.logprobs is not None and len(self.logprobs) != count:
            raise ValueError(f"logprobs: {len(self.logprobs)} values for {count} token_ids; they must be as many")
        if any(value > LOGPROB_SLACK for value in self.logprobs or ()):
            raise ValueError("logprobs: a log-probability is above 0")
        if count + len(self.prompt_token_ids or ()) > MAX_TOKENS:
            raise ValueError(f"prompt and completion have more than {MAX_TOKENS} tokens")
        return self


class Preference(_Post):
    """Feedback that one response was better than another response."""

    kind: Literal["preference"]
    chosen: InferenceId
    rejected: InferenceId
    strength: Finite = Field(1.0, gt=0, le=1)


class PostedPreference(_Post):
    """Feedback that one answer to a prompt is better than another answer; Penstock served neither of them."""

    kind: Literal["preference"]
    model: ModelName = Field(description="Name or id of the online job")
    messages: Messages = Field(default_factory=list, max_length=4096, description="The prompt")
    prompt_token_ids: Tokens | None = Field(
        None, min_length=1, max_length=MAX_TOKENS, description="Prompt as token ids"
    )
    chosen: Answer = Field(description="A text, or a message of the assistant")
    rejected: Answer
    strength: Finite = Field(1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _has_one_prompt(self) -> PostedPreference:
        if bool(self.messages) == (self.prompt_token_ids is not None):
            raise ValueError("a preference between texts needs a prompt: messages, or prompt_token_ids")
        return self


class Correction(_Post):
    """Feedback that corrects a response."""

    kind: Literal["correction"]
    inference_id: InferenceId
    corrected: Message


_PROMPT_KEYS = ("model", "messages", "prompt_token_ids")
"""Keys of a preference between texts; a preference between responses has none of them."""


def _kind(value: Any) -> str:
    """Return the tag of the union member that validates ``value``, so that errors concern only this member."""
    if not isinstance(value, dict):
        return "inference"
    kind = value.get("kind")
    if kind == "preference" and not value.keys().isdisjoint(_PROMPT_KEYS):
        return "posted_preference"
    if kind is not None:
        return str(kind)
    by_episode = value.get("inference_id") is None and value.get("episode_id") is not None
    return "episode" if by_episode else "inference"


FeedbackPost = Annotated[
    Annotated[MetricByInference, Tag("inference")]
    | Annotated[MetricByEpisode, Tag("episode")]
    | Annotated[PostedInteraction, Tag("interaction")]
    | Annotated[Preference, Tag("preference")]
    | Annotated[PostedPreference, Tag("posted_preference")]
    | Annotated[Correction, Tag("correction")],
    Discriminator(
        _kind,
        custom_error_type="unknown_kind",
        custom_error_message="kind must be interaction, preference or correction; a metric has none",
    ),
]


class FeedbackBody(RootModel[FeedbackPost]):
    """Request body with one item of feedback."""


class FeedbackBodies(RootModel[list[FeedbackPost]]):
    """Request body with a batch of feedback."""

    root: list[FeedbackPost] = Field(min_length=1, max_length=MAX_ITEMS)


POST: TypeAdapter[Any] = TypeAdapter(FeedbackPost)
"""Validates the body of one item of feedback."""
POSTS: TypeAdapter[list[Any]] = TypeAdapter(list[FeedbackPost])
"""Validates the bodies of a whole batch; raises an error if any item is invalid."""
KIND_TAGS = frozenset({"inference", "episode", "interaction", "preference", "posted_preference", "correction"})
"""Tags of the members of ``FeedbackPost``, as they appear in the locations of validation errors."""


class ConsentBody(BaseModel):
    """Request body with the consent of a user."""

    model_config = ConfigDict(extra="forbid")

    train: StrictBool = Field(description="false: interactions are served and never trained on")


def is_number(value: Any) -> bool:
    """Return True for a finite number that is not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
