"""Rendering of messages and prompts to token ids. Prompts given as token ids are not changed."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jinja2
import xxhash
from transformers import PreTrainedTokenizerFast

from penstock.shared.errors import ConfigError
from penstock.shared.protocol.live.inference import InferenceRequest

__all__ = ["DEFAULT_TEMPLATE", "Prompt", "Renderer", "content_text"]

DEFAULT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Template for tokenizers without a chat template: one line per message, and the beginning of the model's next line."""


class Prompt(NamedTuple):
    """Token ids of a prompt and their text, including special tokens."""

    token_ids: list[int]
    text: str


class Renderer:
    """Renders with the tokenizer's chat template, or with ``DEFAULT_TEMPLATE``. Construct it off the event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template_args: dict[str, Any]) -> None:
        self._tokenizer, self._template_args = tokenizer, template_args
        self._template = tokenizer.chat_template or DEFAULT_TEMPLATE
        self._backend: Any = tokenizer.backend_tokenizer
        digest = xxhash.xxh3_128(tokenizer.backend_tokenizer.to_str().encode())
        digest.update(json.dumps([self._template, template_args], sort_keys=True, default=str).encode())
        self.digest = digest.hexdigest()

    def prompts(self, request: InferenceRequest) -> list[Prompt]:
        """Return the prompts of a request; a chat request has exactly one prompt.

        Raises:
            ConfigError: the template rejects the messages, or a prompt is empty.
        """
        if request.kind == "chat":
            text = self.text(request.messages, tools=request.tools, template_args=request.template_args)
            found = [Prompt(self.encode(text), text)]
        else:
            found = [
                Prompt(self._tokenizer.encode(prompt, add_special_tokens=True), prompt)
                if isinstance(prompt, str)
                else Prompt(prompt, self.spell(prompt))
                for prompt in request.prompts
            ]
        if not all(prompt.token_ids for prompt in found):
            raise ConfigError("the prompt is empty: it needs at least one token")
        return found

    def spell(self, token_ids: list[int]) -> str:
        """Return the text of tokens, including special ones; unknown ids are skipped."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_args: dict[str, Any] | None = None,
    ) -> list[int]:
        """Render a chat with ``text`` and return its token ids. Raises ConfigError as ``text`` does."""
        return self.encode(self.text(messages, tools=tools, template_args=template_args))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, a rendered chat or a part of one."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_args: dict[str, Any] | None = None,
    ) -> str:
        """Render a chat as text that ends where the model's next turn begins.

        Raises:
            ConfigError: the template rejects the messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [_message(message) for message in messages],
                chat_template=self._template,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=True,
                **{**self._template_args, **(template_args or {})},
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"the chat template refuses the messages: {error}") from None
        return str(text)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: text as one string, arguments of tool calls as objects."""
    found = {**message, "content": content_text(message.get("content"))}
    calls = [_call(call) for call in message.get("tool_calls") or []]
    if calls:
        found["tool_calls"] = calls
    else:
        found.pop("tool_calls", None)
    return found


def content_text(content: Any) -> str:
    """Return the content of a message as one string. Raises ConfigError for content other than text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise ConfigError("content may be text or a list of {'type': 'text', 'text': ...}: this model sees no images")
    return "".join(str(part) for part in parts)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    try:
        arguments = json.loads(function.get("arguments", ""))
    except (TypeError, ValueError):
        return {**call, "function": function}
    return {**call, "function": {**function, "arguments": arguments}}
