"""One completion on its way through the engine."""

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
    """Sample ``index`` of the request with serial number ``request``.

    ``stop_ids`` are all tokens that end it, ``seed`` is its own.
    """

    request: int
    index: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    starts: list[tuple[int, str, int]] = field(default_factory=list)
    """(policy version, short digest of its weights, output tokens before its first one), oldest first."""
    streamed: bool = False
    """Its tokens are told as they are sampled."""
    session: str = ""
    """Keys and values that were kept for this session are used."""
    keep: bool = False
    """Its own are kept for the next request of the session."""
    num_cached: int = 0
    """Tokens of its prompt whose keys and values were held from before; 0 again once it is decoded."""
    top_logprobs: int = 0
    top: list[Likely] = field(default_factory=list)
    """An entry per output token where ``top_logprobs`` is set."""
    matcher: Matcher | None = None
    """Says which tokens keep to the form that was asked for."""

    def adopt(self, version: int, weights: str, num_output: int) -> None:
        """Tokens from ``num_output`` on are produced by ``version`` with these ``weights``."""
        if self.starts and self.starts[-1][2] == num_output:
            self.starts.pop()
        self.starts.append((version, weights, num_output))


@dataclass(slots=True, frozen=True, eq=False)
class Finished:
    """A completion and what became of it."""

    completion: Completion
    sample: Sample

    def with_experts(self, experts: NDArray[Any]) -> Finished:
        """The same with its router table; see ``Sample.experts``."""
        return Finished(self.completion, msgspec.structs.replace(self.sample, experts=experts))


def finished(completion: Completion, token_ids: list[int], logprobs: list[float], finish: Finish) -> Finished:
    """Close a completion; version spans cover every token. One that lost its form did not stop by itself."""
    if finish == "stop" and completion.matcher is not None and completion.matcher.stuck:
        finish = "length"
    ends = [start for _, _, start in completion.starts[1:]] + [len(token_ids)]
    begun = zip(completion.starts, ends, strict=False)
    spans = [Span(version, start, end, weights) for (version, weights, start), end in begun if end > start]
    sample = Sample(token_ids=token_ids, logprobs=logprobs, finish=finish, spans=spans, top=completion.top)
    return Finished(completion, sample)
