"""Bodies of chat and text completions in OpenAI's format, and their translation to a request for a rollout worker."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from penstock.services.coordinator.api.live.completion_form import constraint_of
from penstock.services.coordinator.api.live.completion_metadata import MAX_USER, RequestMetadata
from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.generation import Constraint
from penstock.shared.protocol.live.inference import ClientSampling, InferenceRequest

__all__ = ["EPISODE", "ChatBody", "CompletionBody", "draft_of", "episode_of"]

EPISODE = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
MAX_CHOICES = 256
"""Maximum number of choices of one request: prompts times ``n``."""
MIN_TEMPERATURE = 1e-3
"""Smallest sampling temperature above 0; dividing logits by less could overflow. Temperature 0 is greedy decoding."""


def _no_tiny_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}")
    return value


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_no_tiny_temperature)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]
UserField = Annotated[str | None, Field(max_length=MAX_USER)]


class StreamOptions(BaseModel):
    """Options of a stream; `include_usage` adds the token counts at its end."""

    include_usage: bool = False


class _Body(BaseModel):
    """Fields common to chat and text completions. Unknown fields are ignored, as in OpenAI's API."""

    model_config = ConfigDict(frozen=True)

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    stop: str | list[str] | None = Field(None, max_length=64)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    ignore_eos: bool | None = False
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    user: UserField = Field(None, description="Stored as a pseudonym. Also: metadata.user_id, safety_identifier")
    safety_identifier: UserField = Field(None, description="User of the request, if nothing else names one")
    metadata: RequestMetadata | None = Field(None, description="Episode, user and tags of the request")
    store: bool | None = Field(None, description="false: the request is not recorded")
    return_token_ids: bool | None = False
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, description="Only 1")
    min_p: float | None = Field(None, description="Only 0")
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias] | None = Field(None, max_length=1024)
    response_format: dict[str, Any] | None = Field(None, description="`text`, `json_object` or `json_schema`")

    @property
    def stops(self) -> list[str]:
        """Non-empty stop strings."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in found if stop]

    @property
    def about(self) -> RequestMetadata:
        """Metadata of the request; empty if the body has none."""
        return self.metadata or RequestMetadata()

    @property
    def named_user(self) -> str:
        """User that the sender names; '' for none."""
        return self.user or self.about.user_id or self.safety_identifier or ""

    def unsupported(self) -> str | None:
        """Return the name of a field whose value no engine supports, or None."""
        asked = {
            "repetition_penalty": self.repetition_penalty not in (None, 1),
            "min_p": self.min_p not in (None, 0),
        }
        return next((name for name, wanted in asked.items() if wanted), None)

    def form(self) -> Constraint | None:
        """Return the constraint on the answer, or None. Raises HttpProblem: 400 invalid or unsupported."""
        return constraint_of(self.response_format)


class Message(BaseModel):
    """A message of a chat; the chat template interprets further fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | Objects | None = None
    tool_calls: Objects | None = None


class ChatBody(_Body):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="`auto`, `none`, `required`, or a function to call"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_logprobs(self) -> int:
        """Number of most likely tokens to report; -1 for no log-probs."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    def unsupported(self) -> str | None:
        """See ``_Body.unsupported``."""
        return "max_tokens" if self.max_tokens == 0 else super().unsupported()

    def form(self) -> Constraint | None:
        """See ``_Body.form``."""
        return constraint_of(
            self.response_format, tools=self.tools, tool_choice=self.tool_choice,
            parallel=self.parallel_tool_calls is not False,
        )  # fmt: skip


class CompletionBody(_Body):
    """Body of `POST /v1/completions`."""

    prompt: (
        str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128, description="Only `n`")
    suffix: str | None = Field(None, description="Only empty")

    @property
    def prompts(self) -> list[str | list[int]]:
        """List of prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def wanted_logprobs(self) -> int:
        """Number of most likely tokens to report; -1 for no log-probs."""
        return -1 if self.logprobs is None else self.logprobs

    def unsupported(self) -> str | None:
        """See ``_Body.unsupported``."""
        if self.best_of not in (None, self.n or 1):
            return "best_of"
        if self.suffix:
            return "suffix"
        return "max_tokens" if self.max_tokens == 0 and not self.echo else super().unsupported()

    @model_validator(mode="after")
    def _has_prompts(self) -> CompletionBody:
        if not self.prompt or len(self.prompts) > 128:
            raise ValueError("prompt: give 1 to 128 prompts")
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"n: prompts times n is more than {MAX_CHOICES}; send several requests")
        return self


def draft_of(body: ChatBody | CompletionBody, raw: bytes, headers: Mapping[str, str], key_id: str) -> InferenceRequest:
    """Return the request for a rollout worker. The live gateway, which sends it, fills in other fields later, such as
    the ids of the answers, the gateway's own id, and the episode.

    Raises:
        HttpProblem: 400 a field has an unsupported value.
    """
    name = body.unsupported()
    if name is not None:
        detail = f"'{name}' with this value is not supported"
        raise HttpProblem(400, "unsupported_parameter", detail, errors=[Flaw(pointer=f"/{name}", detail=detail)])
    form = body.form()
    beside = {"min_tokens": bool(body.min_tokens), "ignore_eos": bool(body.ignore_eos)} if form is not None else {}
    for field in (field for field, wanted in beside.items() if wanted):
        detail = f"'{field}' cannot be combined with an answer of a given form, which ends where that does"
        raise HttpProblem(400, "unsupported_parameter", detail, errors=[Flaw(pointer=f"/{field}", detail=detail)])
    about = body.about
    side = headers.get("x-turn-type", "").lower() == "side"
    return InferenceRequest(
        ids=[],
        gateway="",
        **_prompt_fields(body),
        n=body.n or 1,
        sampling=_sampling(body),
        constraint=form,
        logprobs=body.wanted_logprobs,
        stream=bool(body.stream),
        store=body.store is not False,
        untrainable="side_turn" if side else "train_false" if about.train is False else "",
        episode="",
        key_id=key_id,
        split=about.split or "train",
        body_digest=blake2b(raw, digest_size=16).hexdigest(),
        tags=about.tags,
        started=bus_time(),
    )


def _prompt_fields(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Return the fields of the request that hold the prompts."""
    if isinstance(body, CompletionBody):
        return {"kind": "completion", "prompts": body.prompts, "echo": bool(body.echo)}
    return {
        "kind": "chat",
        "messages": [message.model_dump(exclude_unset=True) for message in body.messages],
        "tools": (body.tools or []) if body.tool_choice != "none" else [],
        "template_args": body.chat_template_kwargs or {},
    }


def episode_of(path: str, headers: Mapping[str, str], body: _Body) -> str:
    """Return the episode that a request names in its path, else in a header, else in its metadata; '' for none.

    Raises:
        HttpProblem: 422 the name is not a valid episode id.
    """
    named = path or headers.get("x-episode-id", "") or body.about.episode_id or ""
    if named and not EPISODE.fullmatch(named):
        raise HttpProblem(422, "invalid_episode", "an episode's id has 1 to 128 letters, digits, '.', '_', ':' or '-'")
    return named


def _sampling(body: ChatBody | CompletionBody) -> ClientSampling:
    most = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        most = body.max_completion_tokens
    return ClientSampling(
        seed=secrets.randbits(48) if body.seed is None else body.seed & ((1 << 62) - 1),
        max_new_tokens=most,
        min_new_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=[(int(token), bias) for token, bias in (body.logit_bias or {}).items()],
        stop=body.stops,
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
    )
