"""Tool that calls a user function."""

from __future__ import annotations

import json
from typing import Any

from penstock.services.env.tools.base import CallError
from penstock.shared.config.tools import FunctionTool
from penstock.shared.data.user_code import import_named
from penstock.shared.errors import ToolError

__all__ = ["Function"]


class Function:
    """Calls ``function(**arguments)``."""

    def __init__(self, config: FunctionTool) -> None:
        """Import the function; the import runs user code. Raises ToolError if the import fails."""
        self._function = import_named(config.path, what="tool function", beside="env", error=ToolError)

    def call(self, arguments: dict[str, Any]) -> str:
        """Return the function's result, as JSON unless it is text. A ValueError becomes an error message to the policy;
        any other exception is a failure of the tool.

        Raises:
            CallError: the function raised ValueError.
        """
        try:
            result = self._function(**arguments)
        except ValueError as error:
            raise CallError(str(error)) from None
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    def close(self) -> None:
        """Do nothing: no resources are held."""
