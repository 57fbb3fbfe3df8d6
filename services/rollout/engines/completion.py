"""State of one completion inside an engine, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from numpy.typing import NDArray

from penstock.services.rollout.engines.constraint import Matcher
from penstock.shared.protocol.generation import Likely, Sample, Sampling, Span

__all__ = ["Completion", "Finish", "Finished", "finished"]

Finish = Literal["stop", "length", "abort"]


@dataclass(slots=True, eq=False)
class Completion:
    """Completion number ``index`` of the request with serial number ``request``.

    ``stop_ids`` are all tokens that end it; ``seed`` is specific to this sample. ``prompt_ids`` ends with the tokens of
    ``begun``, so only the tokens that this engine samples are output tokens.
    """

    request: int
    index: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    starts: list[tuple[int, str, int]] = field(default_factory=list)
    """(policy version, short digest of its weights, index of its first output token), oldest first."""
    streamed: bool = False
    """True if a listener receives the tokens as they are sampled."""
    session: str = ""
    """Session whose held keys and values are reused; empty: none."""
    keep: bool = False
    """True to hold the keys and values of this completion for the next request of its session."""
    num_cached: int = 0
    """Length of the prefix whose keys and values are in the cache; 0 if the cache has none or all of the tokens."""
    top_logprobs: int = 0
    top: list[Likely] = field(default_factory=list)
    """One entry per output token if ``top_logprobs`` > 0; else empty."""
    matcher: Matcher | None = None
    """Decides which tokens satisfy the constraint of the request; None: no constraint."""
    begun: Sample | None = None
    """Aborted sample that this completion continues; None: it starts anew."""

    @property
    def num_begun(self) -> int:
        """Number of tokens in ``begun``; 0 if ``begun`` is None."""
        return len(self.begun.token_ids) if self.begun is not None else 0

    def adopt(self, version: int, weights: str, num_output: int) -> None:
        """Label output tokens from index ``num_output`` on with ``version`` and the short digest ``weights``."""
        if self.starts and self.starts[-1][2] == num_output:
            self.starts.pop()
        self.starts.append((version, weights, num_output))


@dataclass(slots=True, frozen=True, eq=False)
class Finished:
    """A finished completion and its sample."""

    completion: Completion
    sample: Sample

    def with_experts(self, experts: NDArray[Any]) -> Finished:
        """Return a copy with the router table; see ``Sample.experts``."""
        return Finished(self.completion, msgspec.structs.replace(self.sample, experts=experts))


def finished(completion: Completion, token_ids: list[int], logprobs: list[float], finish: Finish) -> Finished:
    """Build the result of a completion with these output tokens; its version spans cover every token.

    A 'stop' becomes 'length' if the matcher is stuck: the answer was cut off before it satisfied its constraint.
    """
    if finish == "stop" and completion.matcher is not None and completion.matcher.stuck:
        finish = "length"
    ends = [start for _, _, start in completion.starts[1:]] + [len(token_ids)]
    begun = zip(completion.starts, ends, strict=False)
    spans = [Span(version, start, end, weights) for (version, weights, start), end in begun if end > start]
    sample = Sample(token_ids=token_ids, logprobs=logprobs, finish=finish, spans=spans, top=completion.top)
    if completion.begun is not None:
        sample = _continued(completion, completion.begun, sample)
    return Finished(completion, sample)


def _continued(completion: Completion, begun: Sample, rest: Sample) -> Sample:
    """Return the tokens of ``begun`` and those of ``rest`` as one sample."""
    num, spans = len(begun.token_ids), list(begun.spans)
    for span in rest.spans:
        start = num + span.start
        if (spans[-1].version, spans[-1].weights) == (span.version, span.weights):
            start = spans.pop().start
        spans.append(Span(span.version, start, num + span.end, span.weights))
    return msgspec.structs.replace(
        rest, token_ids=[*begun.token_ids, *rest.token_ids], logprobs=[*begun.logprobs, *rest.logprobs], spans=spans,
        top=[*([] for _ in range(num)), *rest.top] if completion.top_logprobs else [],
    )  # fmt: skip
