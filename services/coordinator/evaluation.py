"""Held-out evaluation of exact versions: which points are due, and what their results add up to. Pure.

A point is a number of completed updates. No batch is sealed past a point that is still being evaluated, so every
completion of a point comes from one policy version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb

from penstock.shared.config.job import EvaluationConfig
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import EvalResult, Ticket

__all__ = ["Evaluation", "EvaluationPlan", "pass_at_k"]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


@dataclass(slots=True)
class Evaluation:
    """One point being evaluated. ``expected`` are the (purpose, prompt index) pairs still missing."""

    point: int
    version: int
    deadline: float
    expected: set[tuple[str, int]]
    rewards: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    failed: int = 0

    def take(self, result: EvalResult) -> bool:
        """Take one prompt's scores; False when it is not awaited (another version, or known already)."""
        key = (result.purpose, result.ordinal)
        if result.version != self.version or key not in self.expected:
            return False
        self.expected.discard(key)
        self.failed += sum(result.failed)
        scores = [0.0 if bad else reward for reward, bad in zip(result.rewards, result.failed, strict=True)]
        self.rewards.setdefault(result.purpose, {})[result.ordinal] = scores
        return True

    def values(self, config: EvaluationConfig) -> dict[str, float]:
        """`eval/greedy`, `eval/avg@k`, `eval/pass@k`; a completion is correct when its reward is >= 1."""
        values = {"eval/failed": float(self.failed), "eval/missing": float(len(self.expected))}
        greedy = self.rewards.get("eval_greedy", {})
        if greedy:
            values["eval/greedy"] = sum(scores[0] for scores in greedy.values() if scores) / len(greedy)
        sampled = [scores for scores in self.rewards.get("eval_sample", {}).values() if scores]
        if sampled:
            flat = [score for scores in sampled for score in scores]
            values[f"eval/avg@{config.samples}"] = sum(flat) / len(flat)
            for k in config.pass_k:
                solved = [pass_at_k(len(s), sum(x >= 1 for x in s), k) for s in sampled if len(s) >= k]
                values[f"eval/pass@{k}"] = sum(solved) / len(solved) if solved else 0.0
        return values


class EvaluationPlan:
    """The points of one job and the evaluation in progress."""

    def __init__(self, config: EvaluationConfig, num_prompts: int) -> None:
        self.config = config
        self.num_prompts = min(config.num_prompts, num_prompts)
        self.done: set[int] = set()
        self.current: Evaluation | None = None

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate."""
        return self.num_prompts > 0 and (self.config.greedy or self.config.samples > 0)

    def due(self, point: int, *, final: bool = False) -> bool:
        """Whether ``point`` (completed updates) must be evaluated and is not yet."""
        if not self.enabled or point in self.done:
            return False
        if point == 0:
            return self.config.at_start
        return (self.config.every > 0 and point % self.config.every == 0) or (final and self.config.at_end)

    def start(self, point: int, version: int, *, deadline: float, epoch: int) -> list[Ticket]:
        """Begin a point; returns its tickets."""
        purposes = (["eval_greedy"] if self.config.greedy else []) + (["eval_sample"] if self.config.samples else [])
        expected = {(purpose, index) for purpose in purposes for index in range(self.num_prompts)}
        self.current = Evaluation(point, version, deadline, expected)
        return [
            Ticket(
                draw=Draw(index),
                min_version=version,
                version=version,
                deadline=deadline,
                epoch=epoch,
                purpose="eval_greedy" if purpose == "eval_greedy" else "eval_sample",
            )
            for purpose, index in sorted(expected)
        ]

    def finish(self) -> dict[str, float]:
        """Close the point in progress and return its values."""
        assert self.current is not None, "no evaluation in progress"
        values = self.current.values(self.config)
        self.done.add(self.current.point)
        self.current = None
        return values
