"""Requests to a rollout engine and its responses. Token ids in, token ids out: text is never re-tokenized."""

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
"""Effect of a pause on running requests. abort: they end with their partial tokens. drain: they finish first. keep:
they are suspended and resume later."""


Likely = list[tuple[int, float]]
"""Most likely tokens at one position with their log-probs, in descending order."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters; ``temperature`` 0 is greedy. Log-probs are of logits / temperature (greedy: of logits).

    Penalties are subtracted from the logits of tokens that the completion already contains: ``frequency_penalty`` per
    occurrence, ``presence_penalty`` once. ``logit_bias`` is added to logits. They change the sampling distribution but
    not the reported log-probs.
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
    """Output tokens [start, end) came from policy ``version``, whose weights have the short digest ``weights``.

    ``weights`` is empty if unknown: in records of earlier versions, and for posted answers.
    """

    version: int
    start: int
    end: int
    weights: str = ""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """Prescribed form of an answer: JSON that fits ``json_schema``, or calls of ``tools``; if both are set, the model
    may choose either.

    Schemas are JSON texts. ``asked_by`` is the field of the request that prescribes the form.
    """

    asked_by: Literal["response_format", "tool_choice"]
    json_schema: str = ""
    tools: tuple[tuple[str, str], ...] = ()
    """Name and argument schema of the tools that may be called."""
    parallel: bool = True
    """True if several calls may follow each other."""


class GenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for ``n`` completions of a prompt. Sample i uses seed + i: results depend only on prompt, seed and
    weights.

    ``top_logprobs``: number of alternatives reported per position, beside the sampled token. The prompt of a request
    may extend the tokens of the previous request of the same ``session`` (n = 1): an engine that kept its cache
    computes only the rest. After a request with ``last`` the engine drops the session's cache. ``constraint``: only
    tokens that fit it are sampled; log-probs remain those of the policy. The last ``answered`` tokens of the prompt are
    the beginning of the constrained answer. ``begun``: an aborted sample of an equal request, which this request
    continues (n = 1, no constraint). Its tokens count in all limits and begin the result; listeners receive only the
    new tokens.
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
    begun: Sample | None = None

    @property
    def input_ids(self) -> list[int]:
        """Tokens of the prompt, followed by the tokens of ``begun``."""
        return self.prompt_ids if self.begun is None else [*self.prompt_ids, *self.begun.token_ids]


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One token of sample ``index``, sent as soon as it is sampled; see ``Span`` for version and weights.

    ``top`` has as many entries as the request's top_logprobs.
    """

    index: int
    token_id: int
    logprob: float
    version: int
    top: Likely = []
    weights: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion: the stop token is included in ``token_ids``; spans cover every token.

    ``experts`` is the router table if it is recorded, uint8 or uint16 [prompt + completion − 1, layers with experts,
    experts of a token]: the last token passed no layer. ``top`` has an entry per token if it was requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    spans: list[Span]
    experts: NDArray[Any] | None = None
    top: list[Likely] = []


class GenResult(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one request, in the order of the samples."""

    request_id: str
    samples: list[Sample]


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs of the tokens of a text under policy ``version``, except the first token, which has none."""

    version: int
    logprobs: list[float]
    top: list[Likely]


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of an engine. A job is rejected at submission if it needs a capability that its engine lacks."""

    transports: tuple[str, ...]
    pause_modes: tuple[str, ...]
    """Modes of ``pause`` that the engine supports; 'keep' includes completions that go on after an update."""
    native_spans: bool
    sleep: bool
    staging: Literal["tensors", "reference"] = "tensors"
    """`tensors`: the worker stages a version of the weights and passes its tensors to the engine. `reference`: the
    engine's processes open and hold the version themselves, and report the digest of its weights."""
    adapters: bool = True
    """True if the engine accepts low-rank adapters without the base weights."""
    routers: bool = True
    """True if the engine records the experts of each token."""
    held: bool = True
    """True if the engine can compute log-probs under weights that it does not serve."""
    candidates: bool = True
    """True if a worker can run a second engine beside this one, for versions that are not served yet."""
    fp32_head: bool = True
    """True if the engine can compute the logits of a bfloat16 model in float32."""
    forms: bool = True
    """True if the engine can sample answers of a prescribed form (``Constraint``)."""
    plain_logprobs: bool = True
    """True if the engine returns log-probs of logits / temperature, whatever the other sampling parameters are."""


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Version of the weights that the engine serves. ``dirty`` is True after a failed in-place update, until a full
    update succeeds.

    ``base`` is the digest of the frozen weights under an adapter; empty if whole weights are updated.
    """

    version: int
    digest: str
    dirty: bool
    base: str = ""
