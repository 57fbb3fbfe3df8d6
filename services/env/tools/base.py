"""Protocol of every tool: take the arguments of one call, answer with text."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["CallError", "Tool"]


class CallError(Exception):
    """The call was wrong: its text is what the policy is told."""


class Tool(Protocol):
    """Blocking; lives in a process that may be killed at any moment. Only those of type ``method`` keep anything."""

    def call(self, arguments: dict[str, Any]) -> str:
        """The result.

        Raises:
            CallError: the policy made a mistake.
            ToolError: the tool broke.
        """
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
