"""A function of the user."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from penstock.shared.config.scorers import FunctionScorer
from penstock.shared.errors import ScoringError

__all__ = ["Function"]


class Function:
    """Calls ``function(prompt, completion, answer, row, **args)``."""

    def __init__(self, config: FunctionScorer) -> None:
        """Raises ScoringError where the path cannot be imported. The import itself runs code of the user."""
        module, _, name = config.path.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ScoringError(
                f"scorer function '{config.path}' cannot be imported: {error}; it must be installed beside the reward "
                f"service or lie on its PYTHONPATH (searched: {', '.join(filter(None, sys.path[:3]))}, ...)"
            ) from None
        if not callable(function):
            raise ScoringError(f"scorer function '{config.path}' is a {type(function).__name__}, not a function")
        self._function = function
        self._args = config.args

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> object:
        """Whatever the function returns."""
        return self._function(prompt, completion, answer, row, **self._args)
