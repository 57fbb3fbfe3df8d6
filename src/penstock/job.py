"""Jobs for scripts and notebooks: ``penstock.train("job.yaml")`` submits one, and shows how it goes.

::

    job = penstock.train("addition.yaml")     # PENSTOCK_URL, PENSTOCK_API_KEY, or your own `penstock up`
    job                                       # in a notebook: its state and its curve
    job.wait()
    job.metrics("reward/mean").to_pandas().plot()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from types import TracebackType
from typing import Any

from penstock.client import Client
from penstock.client.calls import JobFile, Row
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["Job", "Metrics", "train"]

REWARD = "reward/mean"
_WIDTH, _HEIGHT = 360, 80
_MAX_POINTS = 10_000
_CURVE_POINTS = 200


@dataclass(frozen=True)
class Metrics:
    """Metrics by update. ``steps`` counts updates; each of ``series`` has a value for each step, None where there is
    none; ``wall`` is when, in Unix seconds."""

    steps: list[int]
    wall: list[float]
    series: dict[str, list[float | None]]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a column for each metric and one row per step.

        Raises:
            ConfigError: pandas is not installed; Penstock does not need it otherwise.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.series, index=pandas.Index(self.steps, name="step"), dtype="float64")


class Job:
    """A job of a deployment, by id, unique start of an id, or name. Each call asks the deployment.

    Raises NotFound where there is no such job. ``client`` stays open; ``with Job(...)`` closes it.
    """

    def __init__(self, ref: str, client: Client | None = None) -> None:
        self.client = client or Client()
        self.id = self.client.find(ref).id

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    @property
    def record(self) -> JobRecord:
        """The job as it is now: ``record.status.phase``, ``record.status.warnings``, ``record.spec``."""
        return self.client.get(self.id)

    def wait(self, timeout_s: float | None = None) -> JobRecord:
        """Wait for its end. Raises DeadlineError: it did not come within ``timeout_s``."""
        return self.client.wait(self.id, timeout_s=timeout_s)

    def metrics(self, *names: str) -> Metrics:
        """Values of these metrics by update, of all where none is named."""
        found = self.client.metrics(self.id, names=list(names) or None, max_points=_MAX_POINTS)
        return Metrics(found["steps"], found["wall"], found["series"])

    def samples(self, limit: int = 20) -> list[Any]:
        """Completions of the newest update with their rewards."""
        return list(self.client.samples(self.id, limit=limit))

    def events(self, *, follow: bool = False) -> Iterator[Row]:
        """Events so far, oldest first; ``follow`` goes on to its end."""
        return self.client.events(self.id, follow=follow)

    def cancel(self) -> JobRecord:
        """Ask it to end."""
        return self.client.cancel(self.id)

    def __repr__(self) -> str:
        record = self.record
        return f"<Job {record.id} {record.name}: {record.status.phase}, update {_progress(record)}>"

    def _repr_html_(self) -> str:
        """State, progress, warnings and curve of the reward, for notebooks."""
        record, found = self.record, self.client.metrics(self.id, names=REWARD, max_points=_CURVE_POINTS)
        status = record.status
        lines = [
            f"<b>{escape(record.name)}</b> <code>{escape(record.id)}</code>",
            f"{escape(status.phase)} {escape(status.message)}, update {_progress(record)}",
            *(f"⚠ {escape(warning.kind)}: {escape(warning.message)}" for warning in status.warnings),
        ]
        return "<div>" + "<br>".join(lines) + svg_curve(found["steps"], found["series"].get(REWARD, [])) + "</div>"


def train(job: JobFile, *, url: str | None = None, api_key: str | None = None) -> Job:
    """Submit a job and come back at once: a YAML file with the code beside it, or a mapping.

    Args:
        url: of the API; default: PENSTOCK_URL, or that of your own `penstock up`.
        api_key: default: PENSTOCK_API_KEY, or the key of your own `penstock up`.

    Raises:
        ConfigError: the job is not valid; one line per flaw.
        Unavailable: no API answers there.
    """
    client = Client(url, api_key=api_key)
    try:
        return Job(client.submit(job).id, client)
    except BaseException:
        client.close()
        raise


def svg_curve(steps: Sequence[int], values: Sequence[float | None]) -> str:
    """An inline SVG of a curve, with its first and last value; '' where there are fewer than two values."""
    known = [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    first, last = known[0][0], known[-1][0]
    points = " ".join(
        f"{_WIDTH * (step - first) / (last - first or 1):.1f},"
        f"{_HEIGHT - 4 - (_HEIGHT - 8) * (value - low) / (high - low or 1):.1f}"
        for step, value in known
    )
    label = f"{REWARD} from {known[0][1]:.3g} at update {first} to {known[-1][1]:.3g} at update {last}"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}" style="display:block">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
        f"<small>{label}</small>"
    )


def _progress(record: JobRecord) -> str:
    total = record.status.total_steps
    return f"{record.status.step}/{total}" if total else str(record.status.step)
