"""Counts interactions and feedback and their statuses, for the metrics row of an update and for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.services.coordinator.online.admission import NUMBER, is_far_off
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.live.interaction import Feedback, FeedbackStatus, InteractionStatus
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
"""Values of the label `reason`; others count as `other`, because each value is a time series for good."""


class Funnel:
    """Counts since the last row."""

    def __init__(self, job: OnlineJob) -> None:
        self._job = job
        self._counts: Counter[str] = Counter()
        self._metric_sums: dict[str, tuple[float, int]] = {}
        """Sum and number of the values of each metric."""
        self._waits_s: list[float] = []
        self._lags: list[int] = []
        self._trial_figures: dict[str, float] = {}

    def on_interaction(self) -> None:
        """Count an interaction."""
        INTERACTIONS.inc()
        self._counts["interactions"] += 1

    def on_feedback(self, items: Sequence[Feedback]) -> None:
        """Count items, and add their values to the means of their metrics (the share of `true` for a boolean one)."""
        self._counts["feedback"] += len(items)
        online = self._job.online
        for name in {item.metric for item in items}:
            if (metric := online.metric(name)) is None:
                continue
            values = [item.value for item in items if item.metric == name and isinstance(item.value, NUMBER)]
            counted = [float(value) for value in values if not is_far_off(value, metric)]
            if counted:
                total, number = self._metric_sums.get(name, (0.0, 0))
                self._metric_sums[name] = sum(counted, total), number + len(counted)

    def on_feedback_statuses(self, statuses: Iterable[FeedbackStatus]) -> None:
        """Count statuses of feedback."""
        for status in statuses:
            FEEDBACK.labels(status.status).inc()
            self._counts[status.status] += 1
            if status.status == "rejected":
                self._counts[f"rejected/{status.reason}"] += 1

    def on_interaction_statuses(self, statuses: Iterable[InteractionStatus]) -> None:
        """Count statuses of interactions, refused ones by reason."""
        for status in statuses:
            refused = status.status == "rejected"
            DECIDED.labels(
                status.status, (status.reason if status.reason in REASONS else "other") if refused else ""
            ).inc()
            if refused:
                self._counts["refused"] += 1
                self._counts[f"refused/{status.reason}"] += 1

    def on_admissions(self, admissions: Sequence[Admission], ended: Sequence[float]) -> None:
        """Count admissions; ``ended`` has the times at which their last answers ended."""
        self._counts["admissions"] += len(admissions)
        self._lags += [admission.lag for admission in admissions]
        self._waits_s += [admission.time - end for admission, end in zip(admissions, ended, strict=True)]

    def on_promotion_decision(self, figures: Mapping[str, float]) -> None:
        """Take over the figures of both arms of a canary trial."""
        self._trial_figures |= {name: value for name, value in figures.items() if name.startswith("canary/")}

    def row(self) -> dict[str, float]:
        """Return the values since the last call, and start counting again."""
        values = {f"online/{name}": float(count) for name, count in sorted(self._counts.items())}
        values |= {f"online/said/{name}": total / number for name, (total, number) in sorted(self._metric_sums.items())}
        if self._waits_s:
            values["online/admitted_after_s"] = sum(self._waits_s) / len(self._waits_s)
            values["online/lag"] = sum(self._lags) / len(self._lags)
        values |= self._trial_figures
        for kept in (self._counts, self._metric_sums, self._waits_s, self._lags, self._trial_figures):
            kept.clear()
        return values
