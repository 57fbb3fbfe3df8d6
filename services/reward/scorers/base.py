"""Protocol of every scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from penstock.shared.errors import ScoringError

__all__ = ["Closable", "Described", "GroupScorer", "Scorer", "need_answer"]


@runtime_checkable
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


@runtime_checkable
class GroupScorer(Protocol):
    """Scores all completions of a prompt at once, for what is cheaper or faster together. Blocking too."""

    def score_group(
        self, prompt: str, completions: Sequence[str], answer: str | None, row: dict[str, Any]
    ) -> Sequence[float | ScoringError]:
        """One score per completion, or why that one has none.

        Raises:
            Exception: of any kind; it fails all completions.
        """


@runtime_checkable
class Described(Protocol):
    """A scorer that has something to say of itself once it is open: a digest, a mechanism, an address."""

    @property
    def about(self) -> str:
        """One line, without secrets; shown in the status of the reward service."""


@runtime_checkable
class Closable(Protocol):
    """A scorer that holds processes or connections."""

    def close(self) -> None:
        """Let go of them."""


def need_answer(answer: str | None, scorer: str) -> str:
    """The reference answer.

    Raises:
        ScoringError: the data has none.
    """
    if answer is None:
        raise ScoringError(f"scorer '{scorer}' needs a reference answer: set data.prompt.answer")
    return answer
