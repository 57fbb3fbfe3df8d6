"""Live requests between the HTTP gateways and the rollout workers. Core NATS: what gets lost is asked for again.

A gateway asks the queue `inference.<job>`; the worker that takes the request answers with ``InferenceReply`` and then
sends ``Chunks`` to the gateway's own subject, one message per gateway and decode step, with what is new in all of the
gateway's requests. Chunks of one choice follow each other without gaps: ``start`` says so. A worker gives a sign at
least every ``SIGN_EVERY_S``, and names what it has in hand; so does a gateway to each worker that has requests of it.
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
    """Sampling parameters of a request; None leaves one to the job. The seed is always given."""

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
    """The part of a choice that the client has already: the next worker goes on from there."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a client, ``n`` choices for each of its prompts (a chat is one prompt).

    ``ids`` are those of the interactions, by choice: choice c belongs to prompt c // n. ``logprobs`` is the number of
    likeliest tokens to report beside each, -1 for no log-probs at all. Without ``stream`` a choice is sent whole.
    ``alone``: the client named no episode. ``wanted``: the choices to answer, where not all of them. ``canary``: the
    version on trial that answers this conversation, -1: none does; where a worker does not have it, the one served.
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
        """Names the request."""
        return self.ids[0]


class InferenceReply(msgspec.Struct, frozen=True, kw_only=True):
    """True if ``worker`` (one session of one process) takes a request; if not, another one may."""

    worker: str
    accepted: bool
    version: int
    prompt_ids: list[list[int]] = []


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that the model wrote; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of a choice. ``start`` counts its output tokens before these; -1: the prompt, echoed.

    ``pieces`` and ``top`` (texts and log-probs of tokens) are there where log-probs were asked for. The chunk with
    ``finish`` is the last one of the choice, sent when its interaction is durable (``recorded``), or cannot be.
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
    """Short digest of the weights of ``version``; empty where it is not known."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A request that this worker gives up; ``error`` names a class of shared/errors.py."""

    request: str
    error: str
    text: str


class Chunks(msgspec.Struct, frozen=True):
    """All that is new for one gateway, and what its requests in hand are (None: not said this time)."""

    worker: str
    chunks: list[Chunk] = []
    failures: list[Failure] = []
    in_hand: list[str] | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway does not want a request any more. ``gone``: its client went away, so what there is gets recorded."""

    request: str
    gone: bool


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Which gateway has a request whose client repeats requests by itself, and its ``ids`` and ``episode``."""

    gateway: str
    ids: list[str]
    episode: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A client that left a request unread at one gateway repeats it at another one, ``gateway``, which asks for it.

    ``key`` is what the tries of one request have in common, ``request`` the id of the earlier try.
    """

    key: str
    request: str
    gateway: str


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """``given`` once the answer is handed over, and its facts; its chunks come from ``worker``.

    It is not where it was read, or where another client waits for it.
    """

    given: bool
    worker: str = ""
    version: int = 0
    prompt_ids: list[list[int]] = []


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway is there, and so are the clients of its requests."""

    gateway: str
