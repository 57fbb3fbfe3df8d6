"""What every scorer does."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.shared.errors import ScoringError

__all__ = ["Scorer", "need_answer"]


class Scorer(Protocol):
    """Scores one completion. Blocking and single-threaded; whoever calls it can kill the process."""

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> object:
        """The score of a completion.

        Args:
            prompt: text of the prompt.
            completion: text the policy wrote.
            answer: reference answer, where the data has one.
            row: the data row.

        Returns:
            Something ``float()`` turns into a finite number; anything else fails the completion.

        Raises:
            Exception: of any kind; it fails the completion.
        """


def need_answer(answer: str | None, scorer: str) -> str:
    """The reference answer.

    Raises:
        ScoringError: the data has none.
    """
    if answer is None:
        raise ScoringError(f"scorer '{scorer}' needs a reference answer: set data.prompt.answer")
    return answer
