"""Text to token ids and token ids to log-probs, asked of a rollout worker: it has the tokenizer and weights.

Request/reply on ``subjects.reading(job)`` (core NATS); asking again is harmless.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ReadReply", "ReadRequest"]


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, as ``messages`` or ``prompt_ids``, and an answer to it, as ``answer`` (a message) or ``token_ids``.

    ``score``: log-probs of the answer's tokens are wanted, too, by the policy ``version`` if the worker holds it, else
    by the one that it serves. ``template``: digest of tokenizer and template that the tokens were made with; '' where
    nobody says.
    """

    messages: list[dict[str, Any]] = []
    prompt_ids: list[int] = []
    answer: dict[str, Any] | None = None
    token_ids: list[int] = []
    score: bool = False
    version: int = -1
    template: str = ""


class ReadReply(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of both, an answer that came as text with the end of sequence; or the ``flaw`` that they have.

    ``logprobs`` are of logits (temperature 1), by the policy ``version``. ``prompt`` and ``text`` are what the tokens
    say, for people, cut where it is long.
    """

    flaw: str = ""
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    version: int = -1
    prompt: str = ""
    text: str = ""
