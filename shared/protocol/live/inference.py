"""Live requests between the HTTP gateways and the rollout workers, over core NATS: lost messages are requested again.

A gateway sends a request to the queue `inference.<job>`; the worker that takes it answers with ``InferenceReply`` and
then sends ``Chunks`` to the gateway's own subject: one message per gateway and decode step, with the new tokens of all
requests of that gateway. Chunks of one choice follow each other without gaps, which ``start`` proves. A worker sends a
heartbeat at least every ``SIGN_EVERY_S`` with the ids of its running requests; a gateway sends heartbeats to each
worker that runs its requests.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.shared.protocol.generation import Constraint, Span

__all__ = [
    "SIGN_EVERY_S",
    "Begun",
    "Cancel",
    "Chunk",
    "Chunks",
    "Claim",
    "Claimed",
    "ClientSampling",
    "Failure",
    "InferenceReply",
    "InferenceRequest",
    "Present",
    "ToolCall",
    "Whereabouts",
]

SIGN_EVERY_S = 1.0


class ClientSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a client's request. A parameter that is None has the value in the job file; the seed is
    always set."""

    seed: int
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a choice that another worker already sent to the client; the new worker continues the choice after this
    part."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a client, with ``n`` choices for each of its prompts (a chat is one prompt).

    ``ids`` are the interaction ids by choice: choice c belongs to prompt c // n. ``logprobs`` is the number of most
    likely tokens to report per position, -1: no log-probs. Without ``stream`` each choice is sent in one chunk.
    ``alone``: the client named no episode. ``wanted``: the choices to answer; empty: all. ``canary``: the version on
    trial that answers this conversation, -1: none; a worker that does not have it uses the served version.
    ``constraint``: the form that each choice must have.
    """

    ids: list[str]
    gateway: str
    kind: Literal["chat", "completion"]
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    template_args: dict[str, Any] = {}
    prompts: list[str | list[int]] = []
    n: int = 1
    sampling: ClientSampling
    constraint: Constraint | None = None
    logprobs: int = -1
    echo: bool = False
    stream: bool = True
    store: bool = True
    untrainable: str = ""
    episode: str
    alone: bool = False
    key_id: str
    user: str = ""
    split: Literal["train", "val"] = "train"
    body_digest: str
    tags: dict[str, str] = {}
    started: float
    begun: dict[int, Begun] = {}
    wanted: list[int] = []
    canary: int = -1

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.ids[0]


class InferenceReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of ``worker`` (one session of one process) to a request. ``accepted`` True: the worker takes the request;
    False: another worker may take it."""

    worker: str
    accepted: bool
    version: int
    prompt_ids: list[list[int]] = []


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """Tool call written by the model; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of a choice. ``start`` is the number of output tokens that precede them; -1 marks the tokens of the
    echoed prompt.

    ``pieces`` and ``top`` (texts and log-probs of tokens) are present if log-probs were requested. The chunk with
    ``finish`` is the last one of the choice; it is sent once its interaction is stored (``recorded``),
    or cannot be stored.
    """

    request: str
    choice: int
    start: int
    token_ids: list[int]
    logprobs: list[float | None]
    version: int
    text: str = ""
    calls: list[ToolCall] = []
    pieces: list[str] = []
    top: list[list[tuple[str, float]]] = []
    finish: str = ""
    recorded: bool = False
    weights: str = ""
    """Short digest of the weights of ``version``; empty if unknown."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Notice from a rollout worker: it cannot complete a request. ``error`` is the name of a class in
    shared/errors.py."""

    request: str
    error: str
    text: str


class Chunks(msgspec.Struct, frozen=True):
    """New chunks and failures for one gateway. ``in_hand`` lists the ids of the gateway's requests that the worker is
    running; None: the list is not part of this message."""

    worker: str
    chunks: list[Chunk] = []
    failures: list[Failure] = []
    in_hand: list[str] | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a gateway that cancels its own request. ``gone``: the client disconnected, so the worker records the
    partial answer."""

    request: str
    gone: bool


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Record that names the gateway which holds the answer to a request, so that a client's retry finds the answer.

    ``ids``: interaction ids of the request; ``episode``: its episode.
    """

    gateway: str
    ids: list[str]
    episode: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``gateway`` to take over the answer that another gateway holds, because the client retried its request
    at ``gateway``.

    ``key`` is common to all attempts of one request, ``request`` is the id of the earlier attempt.
    """

    key: str
    request: str
    gateway: str


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``Claim``: ``given`` is True if the replying gateway transfers the answer.

    Then it sends the chunks under the name ``worker``; ``version`` and ``prompt_ids`` belong to the answer. It does not
    transfer an answer that was read already, or that another client waits for.
    """

    given: bool
    worker: str = ""
    version: int = 0
    prompt_ids: list[list[int]] = []


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of ``gateway`` to a worker that runs its requests."""

    gateway: str
