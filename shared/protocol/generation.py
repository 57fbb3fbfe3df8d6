"""Requests to a rollout engine and what it answers. Token ids in, token ids out: text is never re-tokenized."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from numpy.typing import NDArray

__all__ = ["Caps", "GenRequest", "GenResult", "PauseMode", "Sample", "Sampling", "Span", "WeightInfo"]

PauseMode = Literal["abort", "drain", "keep"]
"""abort: running requests end with their partial tokens. drain: they finish first. keep: they wait and go on."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample; ``temperature`` 0 is greedy. Log-probs are of logits / temperature (greedy: of logits)."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) were produced by policy ``version``."""

    version: int
    start: int
    end: int


class GenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``n`` completions of one prompt. Sample i uses seed + i: a result depends on prompt, seed and weights only."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    n: int = 1


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion: the stop token is included in ``token_ids``; spans cover every token.

    ``experts`` is the router table where it is recorded, uint8 or uint16 [prompt + completion − 1, layers with experts,
    experts of a token]: the last token went through no layer.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    spans: list[Span]
    experts: NDArray[Any] | None = None


class GenResult(msgspec.Struct, frozen=True, kw_only=True):
    """The completions of one request, in order."""

    request_id: str
    samples: list[Sample]


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do."""

    transports: tuple[str, ...]
    pause_modes: tuple[str, ...]
    native_spans: bool
    sleep: bool


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Version the engine serves; ``dirty`` after a failed in-place update until a full one succeeds.

    ``base`` is the digest of the frozen weights under an adapter; empty where whole weights are updated.
    """

    version: int
    digest: str
    dirty: bool
    base: str = ""
