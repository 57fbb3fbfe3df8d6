"""The newest value of every metric of the jobs that are led here, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.shared.runtime import metrics

__all__ = ["JobGauges"]

VALUES = metrics.gauge("job_metric", "Newest value of a metric of a job that is led here.", ["job", "metric"])


class JobGauges:
    """Those of one job. A row takes the place of the one before of its kind: what it lacks is not shown any more."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._shown: dict[str, frozenset[str]] = {}

    def show(self, kind: str, values: Mapping[str, float]) -> None:
        """A new row of ``kind``."""
        for name in self._shown.get(kind, frozenset()) - values.keys():
            VALUES.remove(self._job, name)
        for name, value in values.items():
            VALUES.labels(self._job, name).set(value)
        self._shown[kind] = frozenset(values)

    def hide(self) -> None:
        """The job is not led here any more: its values stand still, or stand elsewhere."""
        for kind in self._shown:
            self.show(kind, {})
