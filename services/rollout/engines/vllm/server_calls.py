"""Conversion between Penstock's requests and results and the JSON of vLLM's ``POST /inference/v1/generate``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.servers.stream import ServerStream, raise_error
from penstock.services.rollout.engines.vllm.calls import finish_of, sampling_fields, score_fields
from penstock.shared.errors import Unavailable, WeightsError
from penstock.shared.protocol.generation import Likely, Token

__all__ = ["Stream", "abort_body", "command_line", "generate_body", "read_scores", "score_body"]

_FLOOR = -9999.0
"""vLLM's server sends this number where the log-prob is -inf or NaN."""
_ID_PREFIX = "generate-tokens-"
"""vLLM's server puts this before the request id of the caller."""


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Return vLLM's engine arguments as command-line options; arguments that are None or False are left out."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words.append(f"{option}={text}")  # in one word, because a negative number alone reads as an option
    return words


def generate_body(rid: str, completion: Completion, *, vocab_size: int) -> dict[str, Any]:
    """Return the body of a streaming request for one completion. The caller must check stop strings itself.

    vLLM's server sends the sampled token and the most likely others, together at most as many as requested. One more
    than the completion needs is requested, because the sampled token may not be among them.
    """
    num = completion.top_logprobs
    fields = sampling_fields(completion) | {"logprobs": min(num + 1, vocab_size) if num else 0}
    prompt = list(completion.prompt_ids)
    return {"request_id": rid, "token_ids": prompt, "stream": True, "output_mode": "tokens", "sampling_params": fields}


def abort_body(rids: Sequence[str]) -> dict[str, Any]:
    """Return the body of a request that ends completions.

    Args:
        rids: ids of the requests, at least one: an empty list would end all requests of vLLM's server.
    """
    assert rids
    return {"request_ids": [f"{_ID_PREFIX}{rid}" for rid in rids]}


def score_body(rid: str, token_ids: Sequence[int], top_logprobs: int) -> dict[str, Any]:
    """Return the body of a request that scores a text. vLLM samples one token after the text."""
    fields = score_fields(top_logprobs)
    return {"request_id": rid, "token_ids": list(token_ids), "output_mode": "tokens", "sampling_params": fields}


def read_scores(
    answer: Mapping[str, Any], token_ids: Sequence[int], top_logprobs: int
) -> tuple[list[float], list[Likely]]:
    """Return the log-prob of each token of a text except the first, and the top tokens at each of these positions.

    Raises:
        Unavailable: the response is not for this text.
    """
    rows = (answer.get("prompt_logprobs") or [])[1:]
    pairs = list(zip(rows, map(str, token_ids[1:]), strict=False))
    if len(rows) != len(token_ids) - 1 or any(token not in row for row, token in pairs):
        raise Unavailable("vLLM scored another text")
    top = [_likely(({**entry, "token_id": token} for token, entry in row.items()), top_logprobs) for row, _ in pairs]
    return [_logprob(row[token]) for row, token in pairs], top if top_logprobs else []


def _likely(entries: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]], num: int) -> Likely:
    """Return the ``num`` most likely tokens of one position; ``entries`` also have the sampled token."""
    ranked = sorted((entry for entry in entries if entry["rank"] is not None), key=lambda entry: int(entry["rank"]))
    return [(int(entry["token_id"]), _logprob(entry)) for entry in ranked if entry["rank"] <= num]


def _logprob(entry: Mapping[str, Any]) -> float:
    value = float(entry["logprob"])
    return value if value > _FLOOR else -math.inf


@dataclass(slots=True, eq=False)
class Stream(ServerStream):
    """A completion that vLLM's server decodes, with its tokens so far."""

    def take(self, part: Mapping[str, Any], label: str) -> tuple[list[Token], Finish | None]:
        """Record the new tokens of an event; see ``ServerStream``. A log-prob at vLLM's floor is recorded as -inf.

        Raises:
            ConfigError: vLLM rejects the request.
            Unavailable: vLLM failed to serve the request, or left out log-probs.
        """
        raise_error("vLLM", part)
        (choice,) = part["choices"]
        tokens, content = choice["token_ids"] or (), (choice["logprobs"] or {}).get("content") or ()
        if [row["token_id"] for row in content] != list(tokens):
            raise Unavailable(f"vLLM sent {len(tokens)} tokens of a completion with {len(content)} log-probs")
        num = self.completion.top_logprobs
        return self.record(
            (
                (row["token_id"], _logprob(row), label, _likely(row["top_logprobs"], num) if num else [])
                for row in content
            ),
            finish_of(choice["finish_reason"]),
        )

    def final(self, part: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Return the weight spans of the final event; None for other events.

        Raises:
            WeightsError: vLLM does not report which weights produced the tokens.
        """
        choices: Sequence[Mapping[str, Any]] = part.get("choices") or ()
        if not choices or choices[0]["finish_reason"] is None:
            return None
        spans: Sequence[Mapping[str, Any]] = choices[0]["weight_versions"] or ()
        if self.token_ids and not spans:
            raise WeightsError("vLLM does not say which weights made the tokens of a completion")
        return spans
