"""Tokenizes and scores answers that this worker did not sample, at the request of the coordinator."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.conversations.rendering import Renderer
from penstock.services.rollout.conversations.text_stream import CLOSE, OPEN
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.held_weights import WeightRing
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.live.reading import ReadReply, ReadRequest

__all__ = ["Reader", "answer_text"]

logger = logging.getLogger(__name__)

MAX_SHOWN = 1 << 16
"""Maximum characters of prompt and answer text returned beside the tokens."""


class Reader:
    """Tokenizes and scores texts for one job, with its tokenizer, its engine, and the earlier weights in ``held``."""

    def __init__(
        self, job: str, renderer: Renderer, tokenizer: PreTrainedTokenizerFast, engine: Engine, held: WeightRing
    ) -> None:
        self._job, self._renderer, self._tokenizer, self._engine, self._held = job, renderer, tokenizer, engine, held

    async def read(self, data: bytes) -> bytes:
        """Answer a request on ``subjects.reading``: return the encoded ``ReadReply``."""
        request, _ = unpack(data, ReadRequest)
        found = await asyncio.to_thread(self._tokens, request)
        if request.score and not found.flaw:
            held = self._held.find(request.version)
            scores = await self._engine.score([*found.prompt_ids, *found.token_ids], held=held)
            found = replace(found, logprobs=scores.logprobs[len(found.prompt_ids) - 1 :], version=scores.version)
        return pack(found, job=self._job)

    def _tokens(self, request: ReadRequest) -> ReadReply:
        try:
            prompt_ids = request.prompt_ids or self._renderer.chat(request.messages)
            token_ids = request.token_ids if request.answer is None else self._answer(request.answer)
        except ConfigError as error:
            logger.info("%s: an answer or its prompt cannot be read: %s", self._job, error)
            return ReadReply(flaw="not_readable")
        if token_ids is None:
            return ReadReply(flaw="not_encodable")
        checks = {
            "other_tokenizer": request.template not in ("", self._renderer.digest),
            "no_tokens": not prompt_ids or not token_ids,
            "completion_too_long": len(prompt_ids) + len(token_ids) > self._engine.max_length,
            "unknown_tokens": not all(0 <= token < len(self._tokenizer) for token in (*prompt_ids, *token_ids)),
        }
        flaw = next((name for name, found in checks.items() if found), "")
        if flaw:
            return ReadReply(flaw=flaw)
        prompt, text = (self._renderer.spell(ids)[:MAX_SHOWN] for ids in (prompt_ids, token_ids))
        return ReadReply(prompt_ids=prompt_ids, token_ids=token_ids, prompt=prompt, text=text)

    def _answer(self, message: dict[str, Any]) -> list[int] | None:
        """Return the tokens of a message, as if the policy had sampled it. Return None if they do not decode to the
        same text."""
        text = answer_text(message)
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        decoded = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        if decoded != text:
            return None
        end = self._tokenizer.eos_token_id
        return token_ids if end is None or not token_ids else [*token_ids, int(end)]


def answer_text(message: dict[str, Any]) -> str:
    """Return a message as a completion: its text, then its tool calls in the policy's format (Hermes, Qwen).

    Raises:
        ConfigError: the message contains something other than text and calls.
    """
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ConfigError("the content of an answer is text")
    parts = [content] if content else []
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError("a tool call of an answer has no function with a name")
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            raise ConfigError("the arguments of a tool call are no JSON") from None
        body = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        parts.append(f"{OPEN}\n{body}\n{CLOSE}")
    return "\n".join(parts)
