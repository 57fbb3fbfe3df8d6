"""The calls of tools in what a policy wrote. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.shared.config.environment import CallFormat
from penstock.shared.config.tools import ToolConfig

__all__ = ["Call", "find_calls"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, or why what stood between the markers is none."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_calls(text: str, form: CallFormat, tools: Sequence[ToolConfig]) -> list[Call]:
    """Every call that is complete, in order; one whose end is missing is none."""
    calls, place = list[Call](), 0
    while (start := text.find(form.begin, place)) >= 0:
        body = start + len(form.begin)
        end = text.find(form.end, body)
        if end < 0:
            break
        calls.append(_parsed(text[body:end]) if form.body == "json" else _only(text[body:end], tools[0]))
        place = end + len(form.end)
    return calls


def _only(body: str, tool: ToolConfig) -> Call:
    """The body is the tool's first required argument, or its first one."""
    schema = tool.parameters
    name = next(iter(schema.get("required") or schema["properties"]))
    return Call(tool.name, {name: body})


def _parsed(body: str) -> Call:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(problem="a call is an object with 'name' and 'arguments'")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(problem="'arguments' must be an object")
    try:
        msgspec.msgpack.encode([call["name"], arguments])
    except (ValueError, OverflowError, RecursionError) as error:  # half of a character, a number of 100 digits
        return Call(problem=f"the call cannot be sent: {error}")
    return Call(call["name"], arguments)
