"""What came in and what became of it, between two updates: values for the row of an update, and for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.services.coordinator.online.admission import out_of_range
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import Fate, Feedback, InteractionFate
from penstock.shared.runtime import metrics

__all__ = ["Funnel"]

INTERACTIONS = metrics.counter("interactions_read", "Live interactions that leaders read.")
FEEDBACK = metrics.counter("feedback_decided", "Items of feedback, by what became of them.", ["status"])
DECIDED = metrics.counter(
    "interactions_decided", "Live interactions, by what became of them, and why they are not trained on.",
    ["status", "reason"],
)  # fmt: skip
REASONS = frozenset(
    {
        "stale", "no_feedback", "opted_out", "no_consent", "sampling_not_replayable", "other_temperature", "side_turn",
        "train_false", "split_val", "canary", "canary_not_compared", "redacted", "client_disconnected", "truncated",
        "episode_over", "too_many_turns", "too_many_waiting", "job_ended", "no_tokens", "prompt_too_long",
        "completion_too_long", "constrained", "lengths_differ", "not_finite", "rolled_back", "over_share",
    }
)  # fmt: skip
"""Values of the label; others are `other`, for each value is a series for good."""


class Funnel:
    """Counts since the last row."""

    def __init__(self, job: OnlineJob) -> None:
        self._job = job
        self._counts: Counter[str] = Counter()
        self._said: dict[str, tuple[float, int]] = {}
        """Sum and number of the values of each metric."""
        self._waits: list[float] = []
        self._lags: list[int] = []
        self._trial: dict[str, float] = {}

    def on_interaction(self) -> None:
        """One was read."""
        INTERACTIONS.inc()
        self._counts["interactions"] += 1

    def on_feedback(self, item: Feedback) -> None:
        """One was read; of metrics the mean value is told, of a boolean one the share of `true`."""
        self._counts["feedback"] += 1
        online = self._job.online
        counts = online.metric(item.metric) is not None and not out_of_range(item, online)
        if counts and isinstance(item.value, float | int):
            total, number = self._said.get(item.metric, (0.0, 0))
            self._said[item.metric] = total + float(item.value), number + 1

    def on_fates(self, fates: Iterable[Fate]) -> None:
        """These were decided."""
        for fate in fates:
            FEEDBACK.labels(fate.status).inc()
            self._counts[fate.status] += 1
            if fate.status == "rejected":
                self._counts[f"rejected/{fate.reason}"] += 1

    def on_interactions(self, fates: Iterable[InteractionFate]) -> None:
        """These were decided; of those that are never trained on, the reason is told."""
        for fate in fates:
            refused = fate.status == "rejected"
            DECIDED.labels(fate.status, (fate.reason if fate.reason in REASONS else "other") if refused else "").inc()
            if refused:
                self._counts["refused"] += 1
                self._counts[f"refused/{fate.reason}"] += 1

    def on_admissions(self, admissions: Sequence[Admission], ended: Sequence[float]) -> None:
        """These were admitted; ``ended`` is when their last answers were."""
        self._counts["admissions"] += len(admissions)
        self._lags += [admission.lag for admission in admissions]
        self._waits += [admission.time - end for admission, end in zip(admissions, ended, strict=True)]

    def on_decision(self, figures: Mapping[str, float]) -> None:
        """It was decided whether a version is served; of one that was tried this tells what both arms earned."""
        self._trial |= {name: value for name, value in figures.items() if name.startswith("canary/")}

    def row(self) -> dict[str, float]:
        """Values since the last call; counting starts again."""
        values = {f"online/{name}": float(count) for name, count in sorted(self._counts.items())}
        values |= {f"online/said/{name}": total / number for name, (total, number) in sorted(self._said.items())}
        if self._waits:
            values["online/admitted_after_s"] = sum(self._waits) / len(self._waits)
            values["online/lag"] = sum(self._lags) / len(self._lags)
        values |= self._trial
        for kept in (self._counts, self._said, self._waits, self._lags, self._trial):
            kept.clear()
        return values
