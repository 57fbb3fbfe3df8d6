"""Calls of tools: a rollout worker asks, an env worker carries them out."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

__all__ = ["MAX_RESULT_CHARS", "ToolReply", "ToolRequest"]

MAX_RESULT_CHARS = 1 << 16
"""A longer result is cut before it is sent."""


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. The id of its envelope names it: a worker that is asked again carries it out once.

    After ``start_by`` (Unix seconds) nobody waits for it any more: a worker that has not begun then does not begin.
    """

    name: str
    arguments: dict[str, Any]
    start_by: float = math.inf


class ToolReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call.

    ``ok``: ``text`` is the result. ``error``: the call was wrong, ``text`` says why and is told to the policy.
    ``failed``: the tool broke or took too long, which says nothing about the call.
    """

    status: Literal["ok", "error", "failed"]
    text: str
