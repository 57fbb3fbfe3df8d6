"""Held-out evaluation, of a policy in training or as a separate job."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.sampling import SamplingConfig

__all__ = ["EvaluationConfig", "MeasureConfig"]


class MeasureConfig(StrictModel):
    """Metrics measured on held-out prompts."""

    num_prompts: int = Field(128, ge=1)
    """Number of held-out prompts, from the start of the evaluation data (its sources in order)."""
    greedy: bool = True
    """Measure `eval/greedy`: one greedy completion per prompt."""
    samples: int = Field(0, ge=0, le=1024)
    """Sampled completions per prompt, for `eval/avg@k` and `eval/pass@k`."""
    pass_k: list[int] = Field(default_factory=list)
    """Values of k for pass@k (unbiased estimator, arXiv 2107.03374 eq. 1); each at most `samples`."""

    @model_validator(mode="after")
    def _k_fits(self) -> MeasureConfig:
        if any(k < 1 or k > self.samples for k in self.pass_k):
            raise ValueError(f"each k of pass_k must lie in 1..samples ({self.samples})")
        return self

    @property
    def completions(self) -> int:
        """Completions per prompt; 0 if the evaluation is disabled."""
        return self.samples + self.greedy

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of this evaluation."""
        greedy = ["eval/greedy"] if self.greedy else []
        sampled = [f"eval/avg@{self.samples}"] if self.samples else []
        return [*greedy, *sampled, *(f"eval/pass@{k}" for k in self.pass_k)]

    def metrics_of(self, sources: Sequence[str]) -> list[str]:
        """Return the names of the metrics over all prompts; with several ``sources`` also those of each source, such as
        `eval/greedy/NAME`."""
        several = sources if len(sources) > 1 else ()
        metrics = self.metrics if sources else []
        return metrics + [f"{metric}/{source}" for source in several for metric in metrics]


class EvaluationConfig(MeasureConfig):
    """Held-out evaluation at an exact version; the next policy update begins only after the evaluation has ended."""

    every: int = Field(0, ge=0)
    """Policy updates between evaluations; 0: evaluate only where at_start and at_end require it."""
    at_start: bool = True
    """Evaluate version 0."""
    at_end: bool = True
    """Evaluate the final version."""
    sampling: SamplingConfig | None = None
    """Sampling settings of the evaluation; default: those of training."""
