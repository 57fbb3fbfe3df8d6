"""A function of the user."""

from __future__ import annotations

from typing import Any

from penstock.shared.config.scorers import FunctionScorer
from penstock.shared.data.user_code import import_named
from penstock.shared.errors import ScoringError

__all__ = ["Function"]


class Function:
    """Calls ``function(prompt, completion, answer, row, **args)``."""

    def __init__(self, config: FunctionScorer) -> None:
        """Raises ScoringError where the path cannot be imported. The import itself runs code of the user."""
        self._function = import_named(config.path, what="scorer function", beside="reward", error=ScoringError)
        self._args = config.args

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> object:
        """Whatever the function returns."""
        return self._function(prompt, completion, answer, row, **self._args)
