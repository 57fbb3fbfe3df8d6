"""From an environment's messages to the tokens that a policy reads: each message is rendered and tokenized once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.observations import without
from penstock.services.rollout.rendering import Renderer, content_text
from penstock.shared.errors import ConfigError

__all__ = ["Conversation"]

_MARK = "what-the-policy-wrote"
"""Stands for a turn of the policy while what follows it is rendered."""

Message = dict[str, Any]


class Conversation:
    """One growing conversation in the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, renderer: Renderer) -> None:
        self._special, self._renderer = list(tokenizer.all_special_tokens), renderer
        self._messages: list[Message] = []
        self._tools: list[Message] = []

    def begin(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[str, list[int]]:
        """The prompt and its token ids. Raises ConfigError where the template refuses the messages."""
        self._messages, self._tools = list(messages), list(tools)
        text = self._renderer.text(self._messages, tools=self._tools)
        return text, self._renderer.encode(text)

    def go_on(self, turn: Message, messages: Sequence[Message], ended_with: str) -> list[int]:
        """Token ids of what follows the policy's ``turn``, up to where it writes again.

        What the policy itself wrote is not rendered: its ids are known. ``ended_with`` is the text of the token that
        ended its turn, which the template writes, too; empty where none did. Special tokens in messages are taken out.

        Raises:
            ConfigError: the template refuses the messages, or hides the policy's turn.
        """
        new = [{**message, "content": self._plain(message)} for message in messages]
        marked = {"role": "assistant", "content": _MARK}
        text = self._renderer.text([*self._messages, marked, *new], tools=self._tools)
        _, found, after = text.rpartition(_MARK)
        if not found:
            raise ConfigError("the chat template leaves out what the policy wrote in an earlier turn")
        self._messages += [turn, *new]
        return self._renderer.encode(after.removeprefix(ended_with))

    def _plain(self, message: Message) -> str:
        return without(content_text(message.get("content")), self._special)
