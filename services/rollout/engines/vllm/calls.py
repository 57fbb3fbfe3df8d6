"""Conversion between Penstock's requests and results and those of vLLM; runs in the rollout worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.remote import Written
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.generation import Likely, Token

__all__ = ["Stream", "finish_of", "likely", "sampling_fields", "sampling_params", "score_fields", "score_params"]

_SEEDS = 1 << 63
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


def finish_of(reason: str | None) -> Finish | None:
    """Return the ``Finish`` for a finish reason of vLLM; None if there is no reason yet, because the completion
    continues."""
    return None if reason is None else _FINISH.get(reason, "abort")


def sampling_fields(completion: Completion) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` for one completion. Stop strings are left out: vLLM runs without a
    tokenizer and cannot check them."""
    wanted = completion.sampling
    return {
        "max_tokens": wanted.max_new_tokens, "min_tokens": wanted.min_new_tokens, "temperature": wanted.temperature,
        "top_p": wanted.top_p, "top_k": wanted.top_k, "frequency_penalty": wanted.frequency_penalty,
        "presence_penalty": wanted.presence_penalty, "logit_bias": dict(wanted.logit_bias) or None,
        "stop_token_ids": list(completion.stop_ids), "ignore_eos": True, "seed": completion.seed % _SEEDS,
        "logprobs": completion.top_logprobs, "detokenize": False,
    }  # fmt: skip


def score_fields(top_logprobs: int) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` for the log-probs of a prompt; vLLM also samples at least one token."""
    return {"max_tokens": 1, "prompt_logprobs": top_logprobs, "detokenize": False}


def sampling_params(completion: Completion) -> Any:
    """Return vLLM's parameters for one completion."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**sampling_fields(completion), output_kind=RequestOutputKind.DELTA)


def score_params(top_logprobs: int) -> Any:
    """Return vLLM's parameters for the log-probs of a prompt."""
    from vllm import SamplingParams

    return SamplingParams(**score_fields(top_logprobs))


def likely(row: Mapping[int, Any], num: int) -> Likely:
    """Return the ``num`` most likely tokens of one position; vLLM's ``row`` also has the sampled token."""
    best = sorted(row.items(), key=lambda item: item[1].rank)
    return [(token, float(entry.logprob)) for token, entry in best if entry.rank <= num]


@dataclass(slots=True, eq=False)
class Stream(Written):
    """A completion that vLLM decodes, with its tokens so far."""

    internal_id: str = ""
    """Request id inside vLLM; empty until vLLM has received the request."""
    starts: Sequence[tuple[str, int]] = ()
    """vLLM's record of the weights that generated the tokens: (weight label, index of the first token with it)."""

    def take(self, part: Any) -> tuple[list[Token], Finish | None]:
        """Record the new tokens of one output of vLLM.

        Returns:
            New tokens except the one that ends the completion, and how it ended; None while it continues.

        Raises:
            WeightsError: vLLM does not report which weights produced a token.
        """
        spans = part.weight_versions
        labels = self.starts or [(span.version, span.start) for span in spans or ()]
        rows = zip(part.token_ids, part.logprobs or (), strict=True)
        return self.record((self._row(token_id, row, labels) for token_id, row in rows), finish_of(part.finish_reason))

    def _row(
        self, token_id: int, row: Mapping[int, Any], labels: Sequence[tuple[str, int]]
    ) -> tuple[int, float, str, Likely]:
        place, num = len(self.token_ids), self.completion.top_logprobs
        known = [label for label, start in labels if start <= place]
        if not known:
            raise WeightsError(f"vLLM does not say which weights made token {place} of a completion")
        return token_id, float(row[token_id].logprob), known[-1], likely(row, num) if num else []
