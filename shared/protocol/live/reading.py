"""Tokenization and log-probs computed by a rollout worker, which has the tokenizer and the weights.

Request/reply on ``subjects.reading(job)`` (core NATS); requests are idempotent.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ReadReply", "ReadRequest"]


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, as ``messages`` or ``prompt_ids``, and an answer to it, as ``answer`` (a message) or ``token_ids``.

    ``score``: also compute log-probs of the answer's tokens, under policy ``version`` if the worker holds it, else
    under the served one. ``template``: digest of the tokenizer and template that made the tokens; '' if unknown.
    """

    messages: list[dict[str, Any]] = []
    prompt_ids: list[int] = []
    answer: dict[str, Any] | None = None
    token_ids: list[int] = []
    score: bool = False
    version: int = -1
    template: str = ""


class ReadReply(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompt and answer, or ``flaw``, a code for the reason why they cannot be used. The tokens of an answer
    given as text end with the end-of-sequence token.

    ``logprobs`` are of logits (temperature 1), under policy ``version``. ``prompt`` and ``text`` are the decoded tokens
    for display, shortened if long.
    """

    flaw: str = ""
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    version: int = -1
    prompt: str = ""
    text: str = ""
