"""Held-out evaluation of exact policy versions: decides when an evaluation is due, and aggregates its results. Pure.

A point is a number of completed updates. No batch is sealed past a point that is still being evaluated, so every
completion of a point comes from one policy version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb

from penstock.shared.config.embodied import EpisodeEvaluationConfig
from penstock.shared.config.evaluation import EvaluationConfig, MeasureConfig
from penstock.shared.data.check import SourceSummary
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import EvalResult, Ticket

__all__ = ["Evaluation", "EvaluationPlan", "Scores", "evaluation_tickets", "pass_at_k"]


Measured = MeasureConfig | EpisodeEvaluationConfig
"""Settings of an evaluation of held-out prompts or episodes."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the estimated probability that at least one of k samples is correct.

    ``1 - C(n-c, k) / C(n, k)`` with n = ``num_samples``, c = ``num_correct`` (arXiv 2107.03374, eq. 1).
    """
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def evaluation_tickets(
    prompts: Iterable[int], version: int, *, deadline: float, epoch: int, temperature: float | None = None
) -> list[Ticket]:
    """Return one ticket per held-out prompt, pinned to ``version``. If ``temperature`` is None, the temperature of the
    job file applies."""
    return [
        Ticket(
            draw=Draw(i), min_version=version, version=version, deadline=deadline, epoch=epoch, purpose="eval",
            temperature=temperature,
        )
        for i in sorted(prompts)
    ]  # fmt: skip


@dataclass(slots=True)
class Scores:
    """Rewards of the completions of one policy. Completions that could not be scored are counted and have no reward.

    Attributes:
        sampled: prompt -> rewards of its sampled completions.
        greedy: prompt -> reward of its greedy completion.
        failed: number of completions without a reward.
        parts: metric name -> values of the simulator episodes that did not fail.
    """

    sampled: dict[int, list[float]] = field(default_factory=dict)
    greedy: dict[int, float] = field(default_factory=dict)
    failed: int = 0
    parts: dict[str, list[float]] = field(default_factory=dict)

    def take(
        self,
        prompt: int,
        rewards: Sequence[float],
        failed: Sequence[bool],
        greedy: Sequence[bool],
        parts: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Add the completions of one prompt."""
        for name, values in (parts or {}).items():
            kept = (value for value, is_failed in zip(values, failed, strict=True) if not is_failed)
            self.parts.setdefault(name, []).extend(kept)
        self.sampled[prompt] = []
        self.failed += sum(failed)
        for reward, is_failed, is_greedy in zip(rewards, failed, greedy, strict=True):
            if is_failed:
                continue
            if is_greedy:
                self.greedy[prompt] = reward
            else:
                self.sampled[prompt].append(reward)

    def values(self, config: Measured, held_out: Sequence[SourceSummary]) -> dict[str, float]:
        """Return the mean rewards of greedy and of sampled completions (`eval/greedy`, `eval/avg@k`), and the mean of
        pass@k over prompts (`eval/pass@k`). A reward >= 1 counts as correct.

        For episodes return `eval/return`, `eval/success` and `eval/length`, means over reset ids.

        pass@k is over the prompts that have at least k rewards. ``held_out`` are the sources of the prompts, in order;
        with several of them, `eval/greedy/NAME` and so on are over the prompts of one source.
        """
        failed = {"eval/failed": float(self.failed)}
        if isinstance(config, EpisodeEvaluationConfig):
            return failed | {f"eval/{name}": sum(found) / len(found) for name, found in self.parts.items() if found}
        values = {**failed, **self._means(config)}
        start = 0
        for source in held_out if len(held_out) > 1 else ():
            means = self._of(range(start, start + source.rows))._means(config)
            values |= {f"{name}/{source.name}": value for name, value in means.items()}
            start += source.rows
        return values

    def _of(self, prompts: range) -> Scores:
        sampled = {prompt: rewards for prompt, rewards in self.sampled.items() if prompt in prompts}
        return Scores(sampled, {prompt: reward for prompt, reward in self.greedy.items() if prompt in prompts})

    def _means(self, config: MeasureConfig) -> dict[str, float]:
        values = {}
        if self.greedy:
            values["eval/greedy"] = sum(self.greedy.values()) / len(self.greedy)
        flat = [reward for rewards in self.sampled.values() for reward in rewards]
        if flat:
            values[f"eval/avg@{config.samples}"] = sum(flat) / len(flat)
        for k in config.pass_k:
            solved = [pass_at_k(len(s), sum(x >= 1 for x in s), k) for s in self.sampled.values() if len(s) >= k]
            if solved:
                values[f"eval/pass@{k}"] = sum(solved) / len(solved)
        return values


@dataclass(slots=True)
class Evaluation:
    """An evaluation in progress, at one point of the training. ``expected``: prompts whose results are missing; times
    are in Unix seconds.

    ``held_since``: time since which a ready batch has waited only for this evaluation; 0: no batch has.
    """

    point: int
    version: int
    deadline: float
    expected: set[int]
    started: float
    scores: Scores = field(default_factory=Scores)
    held_since: float = 0.0

    def take(self, result: EvalResult) -> bool:
        """Add the scores of one prompt; return False if ``result`` is not expected (another version, or a prompt that
        is already scored)."""
        if result.version != self.version or result.ordinal not in self.expected:
            return False
        self.expected.discard(result.ordinal)
        self.scores.take(result.ordinal, result.rewards, result.failed, result.greedy, result.parts)
        return True


class EvaluationPlan:
    """Evaluations of one job: the points (numbers of completed updates) already evaluated, and the evaluation in
    progress. The prompts come from the sources ``held_out``."""

    def __init__(self, config: EvaluationConfig | EpisodeEvaluationConfig, held_out: Sequence[SourceSummary]) -> None:
        self.config = config
        self.num_prompts = min(config.num_prompts, sum(source.rows for source in held_out))
        self._held_out = held_out
        self.done: set[int] = set()
        self.current: Evaluation | None = None

    @property
    def enabled(self) -> bool:
        """True if the job has held-out prompts, and the evaluation samples completions of them."""
        return self.num_prompts > 0 and self.config.completions > 0

    def due(self, point: int, *, final: bool = False) -> bool:
        """Return True if an evaluation is planned at ``point`` (completed updates) and has not been done."""
        if not self.enabled or point in self.done:
            return False
        if point == 0:
            return self.config.at_start
        return (self.config.every > 0 and point % self.config.every == 0) or (final and self.config.at_end)

    def start(
        self, point: int, version: int, *, now: float, deadline: float, epoch: int, temperature: float | None = None
    ) -> list[Ticket]:
        """Start the evaluation at ``point`` (completed updates) and return its tickets. ``temperature`` applies unless
        the evaluation has its own sampling."""
        self.current = Evaluation(point, version, deadline, set(range(self.num_prompts)), now)
        temperature = temperature if self.config.sampling is None else None
        return evaluation_tickets(
            self.current.expected, version, deadline=deadline, epoch=epoch, temperature=temperature
        )

    def waits(self, now: float, *, batch_ready: bool) -> bool:
        """Return True while the evaluation in progress lacks results and its deadline has not passed. On the first call
        at which a batch is ready, store ``now``: from then on, the evaluation delays this batch.

        ``batch_ready``: True if a batch could be sealed, were it not for this evaluation.
        """
        current = self.current
        if current is None or not current.expected or now >= current.deadline:
            return False
        if batch_ready and not current.held_since:
            current.held_since = now
        return True

    def roll_back(self, updates: int) -> None:
        """Forget the evaluation in progress, and all points above ``updates``, the number of updates that a rollback
        keeps."""
        self.done = {point for point in self.done if point <= updates}
        self.current = None

    def finish(self, now: float) -> dict[str, float]:
        """End the evaluation in progress and return its values, with its duration and the time for which it delayed a
        batch."""
        current = self.current
        assert current is not None, "no evaluation in progress"
        values = current.scores.values(self.config, self._held_out) | {
            "eval/missing": float(len(current.expected)),
            "eval/seconds": now - current.started,
            "eval/held_seconds": now - current.held_since if current.held_since else 0.0,
        }
        self.done.add(current.point)
        self.current = None
        return values
