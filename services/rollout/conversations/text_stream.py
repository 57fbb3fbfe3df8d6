"""Incremental decoding of tokens to text.

Text is released only in whole characters and without any part of a stop string; tool calls are returned separately.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from penstock.shared.protocol.live.inference import ToolCall

__all__ = ["CLOSE", "OPEN", "TextStream", "ToolCalls", "held_back"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_BLOCK = 1 << 16
"""Maximum characters between the markers of a call. A longer block counts as text, which bounds the buffer."""
_UNFINISHED = "\ufffd"
"""Character that a decoder writes for bytes of an incomplete character."""


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the start of a marker."""
    longest = max(map(len, markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


class TextStream:
    """Decodes one completion to text, token by token. The text ends before the first stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, stop
        self._token_ids: list[int] = []
        self._start = self._read = 0
        """Bounds of the tokens that are decoded again with the next tokens, so that the next text gets its leading
        space."""
        self._pending = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the new text that no later token can change."""
        self._token_ids += token_ids
        if self.stopped:
            return ""
        before = self._decode(self._token_ids[self._start : self._read])
        now = self._decode(self._token_ids[self._start :])
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        self._start, self._read = self._read, len(self._token_ids)
        return self._release(now[len(before) :], final=False)

    def close(self) -> str:
        """Return the remaining text after the last token."""
        if self.stopped:
            return ""
        before = self._decode(self._token_ids[self._start : self._read])
        now = self._decode(self._token_ids[self._start :])
        self._read = len(self._token_ids)
        return self._release(now[len(before) :], final=True)

    def _release(self, text: str, *, final: bool) -> str:
        self._pending += text
        cuts = [place for stop in self._stop if (place := self._pending.find(stop)) >= 0]
        if cuts:
            self.stopped = True
            released, self._pending = self._pending[: min(cuts)], ""
            return released
        keep = 0 if final else held_back(self._pending, self._stop)
        released, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return released


@dataclass(slots=True)
class ToolCalls:
    """Extracts tool calls from text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen).

    Blocks that do not parse stay text. The id of a call depends only on ``owner`` and on the number of calls before it.
    """

    owner: str = ""
    valid: bool | None = None
    """True if all calls so far were parsed, False if one was not; None without calls."""
    num_calls: int = 0
    _pending: str = ""
    _scanned: int = 0
    """No end marker of a call begins before this index of the pending text."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Append text; return the text outside of calls, and the completed calls."""
        pending = self._pending + text
        content: list[str] = []
        calls: list[ToolCall] = []
        place, close = 0, pending.find(CLOSE, self._scanned)
        while (start := pending.find(OPEN, place)) >= 0:
            body = start + len(OPEN)
            if 0 <= close < body:
                close = pending.find(CLOSE, body)
            if close < 0 and len(pending) < body + MAX_BLOCK + len(CLOSE):
                break
            if close < 0 or close > body + MAX_BLOCK:
                self._judge(False)
                content.append(pending[place:body])
                place = body
                continue
            call, end = _parsed(pending[body:close], self._id(self.num_calls + len(calls))), close + len(CLOSE)
            self._judge(call is not None)
            content.append(pending[place:end] if call is None else pending[place:start].rstrip())
            calls += [call] if call is not None else []
            place = end
        self.num_calls += len(calls)
        certain = _certain(pending, place, start)
        content.append(pending[place:certain])
        self._pending = pending[certain:]
        self._scanned = max(0, len(self._pending) - len(CLOSE) + 1)
        return "".join(content), calls

    def close(self) -> str:
        """Return the remaining text at the end, with any call that lacks its end marker."""
        left, self._pending, self._scanned = self._pending, "", 0
        if OPEN in left:
            self._judge(False)
        return left if left.strip() or not self.num_calls else ""

    def _id(self, number: int) -> str:
        return f"call_{blake2b(f'{self.owner} {number}'.encode(), digest_size=12).hexdigest()}"

    def _judge(self, parsed: bool) -> None:
        self.valid = parsed and self.valid is not False


def _certain(text: str, place: int, start: int) -> int:
    """Return the index up to which the text after ``place`` certainly belongs to no tool call.

    The text after this index is a call, may become a call, or is whitespace that may precede a call.

    Args:
        start: index at which a call begins; -1: no call begins.
    """
    if start < 0:
        start = len(text) - held_back(text[max(place, len(text) - len(OPEN)) :], [OPEN])
    return place + len(text[place:start].rstrip())


def _parsed(text: str, id: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(id, name, json.dumps(arguments, ensure_ascii=False))
