"""Environments as users write them. The env service imports this file by PYTHONPATH."""

from __future__ import annotations

import re
from typing import Any

TERM = re.compile(r"(\d+)([-+*])(\d+)")


class Calculator:
    """Computes expressions; rewards an episode for the right expression and for the right final answer."""

    def __init__(self, seed: int, row: dict[str, Any]) -> None:
        self.answer = row["answer"]
        self.results: list[str] = []

    def compute(self, expression: str) -> str:
        found = TERM.fullmatch(expression)
        if found is None:
            raise ValueError("not an expression")
        a, b = int(found[1]), int(found[3])
        self.results.append(str({"+": a + b, "-": a - b, "*": a * b}[found[2]]))
        return self.results[-1]

    def reward(self, answer: str) -> float:
        """Return 0.5 if a result was the reference answer, plus 0.5 if the final answer is."""
        return 0.5 * (self.answer in self.results) + 0.5 * (answer == self.answer)
