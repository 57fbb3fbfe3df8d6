"""A function of the user as a tool."""

from __future__ import annotations

import importlib
import json
from typing import Any

from penstock.services.env.tools.base import CallError
from penstock.shared.config.tools import FunctionTool
from penstock.shared.errors import ToolError

__all__ = ["Function"]


class Function:
    """Calls ``function(**arguments)``."""

    def __init__(self, config: FunctionTool) -> None:
        """Raises ToolError where the path cannot be imported. The import itself runs code of the user."""
        module, _, name = config.path.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ToolError(
                f"tool function '{config.path}' cannot be imported: {error}; it must be installed beside the env "
                "service or lie on its PYTHONPATH"
            ) from None
        if not callable(function):
            raise ToolError(f"tool function '{config.path}' is a {type(function).__name__}, not a function")
        self._function = function

    def call(self, arguments: dict[str, Any]) -> str:
        """The result as it is if it is text, else as JSON. Whatever else the function raises breaks the tool.

        Raises:
            CallError: the function raised ValueError.
        """
        try:
            result = self._function(**arguments)
        except ValueError as error:
            raise CallError(str(error)) from None
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    def close(self) -> None:
        """Nothing is held."""
