"""Answers calls in a tool process; exceptions of user code become replies, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.services.env.tools.base import CallError, Tool
from penstock.shared.config.tools import ToolConfig
from penstock.shared.errors import ToolError
from penstock.shared.protocol.tools import MAX_RESULT_CHARS

__all__ = ["Toolbox", "attempt", "describe"]

_MAX_ERROR_CHARS = 600


class Toolbox:
    """The tools that a process has opened, with their argument schemas."""

    def __init__(self, configs: list[Any], open_: Callable[[Any], Tool]) -> None:
        """Open all tools. Exceptions of ``open_`` propagate."""
        self._tools: Mapping[str, Tool] = {config.name: open_(config) for config in configs}
        self._configs: Mapping[str, ToolConfig] = {config.name: config for config in configs}

    def answer(self, request: dict[str, Any]) -> dict[str, str]:
        """Execute a call and return its ``ToolReply`` as a message."""
        name, arguments = request["name"], request["arguments"]
        return attempt(f"tool '{name}'", lambda: self._call(name, arguments))

    def close(self) -> None:
        """Close all tools."""
        for tool in self._tools.values():
            tool.close()

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self._tools:
            raise CallError(f"there is no tool '{name}'; there is: {', '.join(self._tools)}")
        _check(self._configs[name].parameters, arguments)
        return self._tools[name].call(arguments)


def attempt(what: str, action: Callable[[], str]) -> dict[str, str]:
    """Run ``action`` (called ``what`` in errors), and return its result or error as the message of a ``ToolReply``."""
    try:
        return _reply("ok", action())
    except CallError as error:
        return _reply("error", str(error))
    except ToolError as error:
        return _reply("failed", str(error))
    except (Exception, SystemExit) as error:  # user code may raise anything
        return _reply("failed", describe(what, error))


def _reply(status: str, text: str) -> dict[str, str]:
    """Build a reply; lone surrogates, which no message can carry, become question marks."""
    return {"status": status, "text": text[:MAX_RESULT_CHARS].encode(errors="replace").decode()}


def _check(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise CallError if arguments are missing or unknown."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    if missing := [name for name in required if name not in arguments]:
        raise CallError(f"argument '{missing[0]}' is missing")
    if unknown := [name for name in arguments if name not in known]:
        raise CallError(f"there is no argument '{unknown[0]}'; there is: {', '.join(known) or 'none'}")


def describe(what: str, error: BaseException) -> str:
    """Return a message that names the exception ``error`` and the user code ``what`` that raised it."""
    return f"{what} raised {type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
