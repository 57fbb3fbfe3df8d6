"""Conversion between Penstock's requests and results and those of vLLM; runs in the rollout worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.remote import Written
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.generation import Likely, Token

__all__ = ["Stream", "likely", "sampling_params", "score_params", "settings_of"]

_SEEDS = 1 << 63
_FINISH: dict[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
_RECEIVING = (
    "host_id", "worker_id", "data_dir", "shm_dir", "bulk_host", "bulk_tls_ca", "bulk_tls_cert", "bulk_tls_key",
)  # fmt: skip


def sampling_params(completion: Completion) -> Any:
    """Return vLLM's parameters for one completion, without stop strings: this vLLM has no tokenizer to check them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted = completion.sampling
    return SamplingParams(
        max_tokens=wanted.max_new_tokens, min_tokens=wanted.min_new_tokens, temperature=wanted.temperature,
        top_p=wanted.top_p, top_k=wanted.top_k, frequency_penalty=wanted.frequency_penalty,
        presence_penalty=wanted.presence_penalty, logit_bias=dict(wanted.logit_bias) or None,
        stop_token_ids=list(completion.stop_ids), ignore_eos=True, seed=completion.seed % _SEEDS,
        logprobs=completion.top_logprobs, detokenize=False, output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip


def score_params(top_logprobs: int) -> Any:
    """Return vLLM's parameters for the log-probs of a prompt; vLLM always samples at least one token after it."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, prompt_logprobs=top_logprobs, detokenize=False)


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
    """vLLM's record of the completion: (weight label, index of the first token with it)."""

    def take(self, part: Any) -> tuple[list[Token], Finish | None]:
        """Record the new tokens of one output of vLLM.

        Returns:
            New tokens except the one that ends the completion, and how it ended; None while it continues.

        Raises:
            WeightsError: vLLM does not report which weights produced a token.
        """
        finish = _FINISH.get(part.finish_reason, "abort") if part.finish_reason is not None else None
        spans = part.weight_versions
        labels = self.starts or [(span.version, span.start) for span in spans or ()]
        told = []
        for token_id, row in zip(part.token_ids, part.logprobs or (), strict=True):
            told.append(self._add(token_id, row, labels))
            if self.ends_with_stop_string():
                finish = "stop"
                break
        if told and finish in ("stop", "length"):
            told.pop()
        return told, finish

    def _add(self, token_id: int, row: Mapping[int, Any], labels: Sequence[tuple[str, int]]) -> Token:
        place, num = len(self.token_ids), self.completion.top_logprobs
        known = [label for label, start in labels if start <= place]
        if not known:
            raise WeightsError(f"vLLM does not say which weights made token {place} of a completion")
        return self.add(token_id, float(row[token_id].logprob), known[-1], likely(row, num) if num else [])


def settings_of(settings: ServiceSettings) -> dict[str, str]:
    """Return the environment variables with which another process receives weights like this one."""
    given = ((name, getattr(settings, name)) for name in _RECEIVING)
    return {f"PENSTOCK_{name.upper()}": str(value) for name, value in given if value}
