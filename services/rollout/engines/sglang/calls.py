"""Conversion between Penstock's requests and results and the JSON of SGLang's ``POST /generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.servers.stream import ServerStream, raise_error
from penstock.shared.errors import Unavailable
from penstock.shared.protocol.generation import Likely, Sampling, Token

__all__ = ["Stream", "generate_body", "read_scores", "score_body"]

_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
_SEEDS = 1 << 63
_ALL_TOKENS = -1
"""SGLang's ``top_k`` value for no truncation."""


def generate_body(rid: str, completion: Completion) -> dict[str, Any]:
    """Return the body of a streaming request for one completion. The caller must check stop strings itself."""
    wanted = completion.sampling
    return {
        "rid": rid, "input_ids": list(completion.prompt_ids), "stream": True, "return_logprob": True,
        "logprob_start_len": -1, "top_logprobs_num": completion.top_logprobs,
        "sampling_params": _sampling_params(wanted, completion.stop_ids, completion.seed),
    }  # fmt: skip


def _sampling_params(wanted: Sampling, stop_ids: Sequence[int], seed: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters. With ``ignore_eos`` SGLang also ignores ``stop_token_ids``: see
    ``Stream.take``. Temperature 0 is greedy in SGLang, too."""
    return {
        "max_new_tokens": wanted.max_new_tokens, "min_new_tokens": wanted.min_new_tokens,
        "temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k or _ALL_TOKENS,
        "frequency_penalty": wanted.frequency_penalty, "presence_penalty": wanted.presence_penalty,
        "logit_bias": {str(token): bias for token, bias in wanted.logit_bias} or None,
        "stop_token_ids": list(stop_ids), "ignore_eos": wanted.ignore_eos, "no_stop_trim": True,
        "skip_special_tokens": False, "sampling_seed": seed % _SEEDS,
    }  # fmt: skip


def score_body(rid: str, token_ids: list[int], top_logprobs: int) -> dict[str, Any]:
    """Return the body of a request that scores a text. The response has an entry without log-prob for the first token,
    and SGLang samples one token after the text."""
    return {
        "rid": rid, "input_ids": token_ids, "stream": False, "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": top_logprobs, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }  # fmt: skip


def read_scores(
    answer: Mapping[str, Any], token_ids: Sequence[int], top_logprobs: int
) -> tuple[list[float], list[Likely]]:
    """Return the log-prob of each token of a text except the first, and the top tokens at each of these positions.

    Raises:
        Unavailable: SGLang aborted the request, or its response is for another text.
    """
    meta = answer["meta_info"]
    rows = (meta.get("input_token_logprobs") or [])[1:]
    if [row[1] for row in rows] != list(token_ids[1:]):
        raise Unavailable(f"SGLang scored another text: {meta.get('finish_reason')}")
    top = [_likely(row) for row in (meta.get("input_top_logprobs") or [])[1:]] if top_logprobs else []
    return [float(row[0]) for row in rows], top


def _likely(row: Sequence[Sequence[Any]] | None) -> Likely:
    return [(int(entry[1]), float(entry[0])) for entry in row or ()]


@dataclass(slots=True, eq=False)
class Stream(ServerStream):
    """A completion that an SGLang server decodes, with its tokens so far."""

    def take(self, part: Mapping[str, Any], label: str) -> tuple[list[Token], Finish | None]:
        """Record the new tokens of an event; see ``ServerStream``.

        Depending on the options of the server, events repeat earlier tokens or not; the final event of a completion
        that was waiting repeats its last token. The total number of tokens therefore determines which ones are new.
        With ``ignore_eos`` the server ignores stop tokens, too; the first one then ends the completion here. Without it
        the server also stops at tokens of its model and tokenizer that the request does not name: such a completion was
        cut off.

        Raises:
            ConfigError: SGLang rejects the request.
            Unavailable: SGLang failed to serve the request, or left out tokens.
        """
        raise_error("SGLang", part)
        meta = part["meta_info"]
        reason = meta.get("finish_reason")
        _raise_failure(reason)
        finish = _FINISH.get(reason["type"], "abort") if reason else None
        rows, top_rows = self._new(meta, "output_token_logprobs"), self._new(meta, "output_top_logprobs")
        stop = next((place for place, row in enumerate(rows) if row[1] in self.completion.stop_ids), None)
        if stop is not None:
            rows, finish = rows[: stop + 1], "stop"
        elif finish == "stop":
            finish = "length"
        return self.record(
            (
                (int(row[1]), float(row[0]), label, _likely(top_rows[place]) if self.completion.top_logprobs else [])
                for place, row in enumerate(rows)
            ),
            finish,
        )

    def final(self, part: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Return the weight spans of the final event; None for other events. Older SGLang versions report no spans."""
        meta = part.get("meta_info") or {}
        return (meta.get("weight_versions") or ()) if meta.get("finish_reason") else None

    def _new(self, meta: Mapping[str, Any], key: str) -> Sequence[Any]:
        """Return the entries of ``meta[key]`` for tokens that are not recorded yet: the last ones, because the list may
        begin with entries of earlier tokens."""
        if key == "output_top_logprobs" and not self.completion.top_logprobs:
            return ()
        num = int(meta.get("completion_tokens", 0)) - len(self.token_ids)
        rows: Sequence[Any] = meta.get(key) or ()
        if num > len(rows):
            raise Unavailable(f"SGLang left out {num - len(rows)} of {num} new tokens of a completion ({key})")
        return rows[len(rows) - num :] if num > 0 else ()


def _raise_failure(reason: Mapping[str, Any] | None) -> None:
    """Raise an error if the finish reason has a status code: then the server itself ended the request."""
    code = (reason or {}).get("status_code")
    if reason is None or code is None:
        return
    raise_error("SGLang", {"error": {"message": reason.get("message", ""), "code": code}})
