"""Scorer that calls a user function."""

from __future__ import annotations

from typing import Any

from penstock.shared.config.rewards.scorers import FunctionScorer
from penstock.shared.data.user_code import check_call, import_named, shown_name
from penstock.shared.errors import ScoringError

__all__ = ["Function"]


class Function:
    """Calls ``function(prompt, completion, answer, row, **args)``."""

    def __init__(self, config: FunctionScorer) -> None:
        """Import the function; the import runs user code. Raises ScoringError if the import or a check of arguments
        fails."""
        self._function = import_named(config.path, what="scorer function", beside="reward", error=ScoringError)
        self._args = config.args
        what, shown = f"scorer function '{shown_name(config.path)}'", "prompt, completion, answer, row, **args"
        check_call(self._function, what, shown, ScoringError, "prompt", "completion", "answer", {}, **self._args)

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> object:
        """Return the function's result."""
        return self._function(prompt, completion, answer, row, **self._args)
