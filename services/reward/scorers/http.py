"""Scorer that requests scores from a web service of the user."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from penstock.services.reward.scorers.endpoint import Call, Endpoint, variable
from penstock.shared.config.rewards.scorers import HttpScorer
from penstock.shared.errors import ScoringError

__all__ = ["Http", "signature"]

_SCHEMA = 1
_QUOTED = 200


class Http:
    """Sends completions by POST in batches. Retries only requests that the service cannot have processed."""

    def __init__(self, config: HttpScorer) -> None:
        """Open the endpoint. Raises ScoringError if the environment lacks a secret."""
        self._config = config
        headers = {}
        if config.api_key_env is not None:
            headers["Authorization"] = "Bearer " + variable(config.api_key_env, "scorer 'http'")
        self._secret = None if config.secret_env is None else variable(config.secret_env, "scorer 'http'")
        self._endpoint = Endpoint(
            config.url, headers, concurrency=config.concurrency, timeout_s=config.timeout_s, repeatable=False
        )
        self.about = config.url

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def score_group(
        self, prompt: str, completions: Sequence[str], answer: str | None, row: dict[str, Any]
    ) -> Sequence[float | ScoringError]:
        """Return the service's score or error for each completion."""
        size = self._config.batch_size
        batches = [list(completions[start : start + size]) for start in range(0, len(completions), size)]
        calls = [self._call(prompt, batch, answer, row) for batch in batches]
        replies = self._endpoint.post_all(calls, self._config.deadline_s)
        return [score for batch, reply in zip(batches, replies, strict=True) for score in _scores(reply, len(batch))]

    def _call(self, prompt: str, completions: list[str], answer: str | None, row: dict[str, Any]) -> Call:
        message = {"schema": _SCHEMA, "prompt": prompt, "completions": completions, "answer": answer}
        if self._config.send_row:
            message["row"] = row
        body = orjson.dumps(message)
        headers = {"Idempotency-Key": secrets.token_hex(16)}  # the same in a retry
        if self._secret is not None:
            moment = str(int(time.time()))
            headers |= {"X-Penstock-Timestamp": moment, "X-Penstock-Signature": signature(self._secret, moment, body)}
        return Call(body, headers)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return ``sha256=`` and the HMAC-SHA256 of ``timestamp + "." + body`` in hexadecimal digits."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _scores(reply: bytes | ScoringError, size: int) -> list[float | ScoringError]:
    if isinstance(reply, ScoringError):
        return [reply] * size
    try:
        results = orjson.loads(reply)["results"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        results = None
    if not isinstance(results, list) or len(results) != size:
        text = reply[:_QUOTED].decode(errors="replace")
        return [ScoringError(f"the service must answer {{'results': [...]}} with {size} entries, not {text!r}")] * size
    return [_score(result) for result in results]


def _score(result: object) -> float | ScoringError:
    score = result.get("score") if isinstance(result, dict) else None
    if isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score):
        return float(score)
    if isinstance(result, dict) and isinstance(result.get("error"), str):
        return ScoringError(f"the service says: {result['error'][:_QUOTED]}")
    return ScoringError(f"a result must be {{'score': number}} or {{'error': text}}, not {str(result)[:_QUOTED]}")
