"""Protocol of tools, which take the arguments of one call and return text."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["CallError", "Tool"]


class CallError(Exception):
    """Raised for an invalid tool call; the policy reads the text of the error."""


class Tool(Protocol):
    """Blocking tool in a process that may be killed at any moment. Only tools of type ``method`` keep state."""

    def call(self, arguments: dict[str, Any]) -> str:
        """Execute one call and return its result.

        Raises:
            CallError: the policy's call was wrong.
            ToolError: the tool failed.
        """
        ...

    def close(self) -> None:
        """Release the tool's resources."""
        ...
