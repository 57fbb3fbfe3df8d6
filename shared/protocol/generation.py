"""Requests to a rollout engine and what it answers. Token ids in, token ids out: text is never re-tokenized."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from numpy.typing import NDArray

__all__ = [
    "Caps",
    "Constraint",
    "GenRequest",
    "GenResult",
    "Likely",
    "PauseMode",
    "Sample",
    "Sampling",
    "Scores",
    "Span",
    "Token",
    "WeightInfo",
]

PauseMode = Literal["abort", "drain", "keep"]
"""abort: running requests end with their partial tokens. drain: they finish first. keep: they wait and go on."""


Likely = list[tuple[int, float]]
"""The likeliest tokens at one position and their log-probs, the likeliest first."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample; ``temperature`` 0 is greedy. Log-probs are of logits / temperature (greedy: of logits).

    Penalties are taken off the logits of tokens that the completion has already: ``frequency_penalty`` for each time,
    ``presence_penalty`` once. ``logit_bias`` is added to logits. All of them change what is drawn, not the log-probs.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) were produced by policy ``version``, whose weights have the short digest ``weights``.

    ``weights`` is empty where nobody knows it: in records of earlier versions, and for what was not sampled here.
    """

    version: int
    start: int
    end: int
    weights: str = ""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer: JSON of a schema, calls of some tools, or, with both, either of them.

    Schemas are JSON. ``asked_by`` is the field of the request that asks for it.
    """

    asked_by: Literal["response_format", "tool_choice"]
    json_schema: str = ""
    tools: tuple[tuple[str, str], ...] = ()
    """Name and schema of the arguments of those that may be called."""
    parallel: bool = True
    """True if several calls may follow each other."""


class GenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``n`` completions of one prompt. Sample i uses seed + i: a result depends on prompt, seed and weights only.

    ``top_logprobs`` tokens are reported at each position beside the sampled one. The prompt of a request may go on from
    what the last one of the same ``session`` ended with (n = 1): an engine that kept its cache computes only the rest.
    After the ``last`` one nothing is kept. ``constraint``: only tokens are drawn that keep to it; log-probs remain
    those of the policy. The last ``answered`` tokens of the prompt are a begun answer that it is the form of.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    n: int = 1
    top_logprobs: int = 0
    session: str = ""
    last: bool = False
    constraint: Constraint | None = None
    answered: int = 0


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One token of sample ``index``, as soon as it is sampled; see ``Span`` for version and weights.

    ``top`` is as long as the request's top_logprobs.
    """

    index: int
    token_id: int
    logprob: float
    version: int
    top: Likely = []
    weights: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion: the stop token is included in ``token_ids``; spans cover every token.

    ``experts`` is the router table where it is recorded, uint8 or uint16 [prompt + completion − 1, layers with experts,
    experts of a token]: the last token went through no layer. ``top`` has an entry per token where it was asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    spans: list[Span]
    experts: NDArray[Any] | None = None
    top: list[Likely] = []


class GenResult(msgspec.Struct, frozen=True, kw_only=True):
    """The completions of one request, in order."""

    request_id: str
    samples: list[Sample]


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs of the tokens of a text under policy ``version``, without the first one, which has none."""

    version: int
    logprobs: list[float]
    top: list[Likely]


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of an engine. A job that asks for more is refused when it is submitted."""

    transports: tuple[str, ...]
    pause_modes: tuple[str, ...]
    native_spans: bool
    sleep: bool
    staging: Literal["tensors", "reference"] = "tensors"
    """tensors: the worker stages a version and hands its tensors to the engine. reference: processes of the engine open
    the version themselves, hold it and prove its digest."""
    adapters: bool = True
    """Takes low-rank adapters alone."""
    routers: bool = True
    """Records the experts of each token."""
    held: bool = True
    """Computes log-probs under weights that it does not serve."""
    candidates: bool = True
    """A second engine, for versions that are not served yet, fits beside it."""
    fp32_head: bool = True
    """Computes the logits of a bfloat16 model in float32."""
    forms: bool = True
    """Keeps an answer to a form."""
    plain_logprobs: bool = True
    """Log-probs are of logits / temperature, however tokens are drawn from them."""


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Version the engine serves; ``dirty`` after a failed in-place update until a full one succeeds.

    ``base`` is the digest of the frozen weights under an adapter; empty where whole weights are updated.
    """

    version: int
    digest: str
    dirty: bool
    base: str = ""
