"""Jobs in scripts and notebooks: ``penstock.train("job.yaml")`` submits one and returns a handle for it.

::

    job = penstock.train("addition.yaml")     # PENSTOCK_URL, PENSTOCK_API_KEY, or your own `penstock up`
    job                                       # in a notebook: its state and its reward curve
    job.wait()                                # in a notebook: both of them live, until the job ends
    job.metrics("reward/mean").to_pandas().plot()
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

from penstock.client import Client
from penstock.client.calls import JobFile, Row
from penstock.shared.errors import ConfigError, PenstockError
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["Job", "Metrics", "train"]

REWARD = "reward/mean"
_WIDTH, _HEIGHT = 360, 80
_MAX_POINTS = 10_000
_CURVE_POINTS = 200
_LIVE_S = 2.0
"""Seconds between two updates of the display in a notebook, while ``wait`` blocks."""


@dataclass(frozen=True)
class Metrics:
    """Values of metrics, for each policy update.

    Attributes:
        steps: number of each update.
        wall: time of each update (Unix seconds).
        series: metric name -> one value per step, None where a step has none.
    """

    steps: list[int]
    wall: list[float]
    series: dict[str, list[float | None]]

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a column for each metric and one row per step.

        Raises:
            ConfigError: pandas is not installed; Penstock does not need it otherwise.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.series, index=pandas.Index(self.steps, name="step"), dtype="float64")


class Job:
    """A job of a deployment, found by id, unique prefix of an id, or name. Each call sends a request to the deployment.

    Raises NotFound if there is no such job. Leaving ``with Job(...)`` closes the client, which otherwise stays open.
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
        """The current record of the job: ``record.status.phase``, ``record.status.warnings``, ``record.spec``."""
        return self.client.get(self.id)

    def wait(self, timeout_s: float | None = None) -> JobRecord:
        """Wait for the end of the job and return its record; a notebook shows state and reward curve meanwhile.

        Raises DeadlineError if the job has not ended after ``timeout_s`` seconds.
        """
        with _shown_live(self):
            return self.client.wait(self.id, timeout_s=timeout_s)

    def metrics(self, *names: str) -> Metrics:
        """Return the values of the metrics ``names`` by update; without ``names``, those of all metrics."""
        found = self.client.metrics(self.id, names=list(names) or None, max_points=_MAX_POINTS)
        return Metrics(found["steps"], found["wall"], found["series"])

    def samples(self, limit: int = 20) -> list[Any]:
        """Return the newest ``limit`` completions with their rewards, newest update first."""
        return list(self.client.samples(self.id, limit=limit))

    def events(self, *, follow: bool = False) -> Iterator[Row]:
        """Yield the events so far, oldest first; with ``follow`` also new events, until the job ends."""
        return self.client.events(self.id, follow=follow)

    def cancel(self) -> JobRecord:
        """Request the end of the job and return its record, without waiting for the end."""
        return self.client.cancel(self.id)

    def __repr__(self) -> str:
        record = self.record
        return f"<Job {record.id} {record.name}: {record.status.phase}, update {_progress(record)}>"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: state, progress, warnings and reward curve."""
        record, found = self.record, self.client.metrics(self.id, names=REWARD, max_points=_CURVE_POINTS)
        status = record.status
        lines = [
            f"<b>{escape(record.name)}</b> <code>{escape(record.id)}</code>",
            f"{escape(status.phase)} {escape(status.message)}, update {_progress(record)}",
            *(f"⚠ {escape(warning.kind)}: {escape(warning.message)}" for warning in status.warnings),
        ]
        return "<div>" + "<br>".join(lines) + svg_curve(found["steps"], found["series"].get(REWARD, [])) + "</div>"


def train(job: JobFile, *, url: str | None = None, api_key: str | None = None) -> Job:
    """Submit a job and return a handle for it, without waiting for its end.

    Args:
        job: path of a YAML file, which may name code by relative paths, or a mapping.
        url: URL of the API; default: PENSTOCK_URL, or http://127.0.0.1:8000, the default address of `penstock up`.
        api_key: default: PENSTOCK_API_KEY, or the key of your own `penstock up`.

    Raises:
        ConfigError: the job is not valid; one line per flaw.
        Unavailable: no API answers at the URL.
    """
    client = Client(url, api_key=api_key)
    try:
        return Job(client.submit(job).id, client)
    except BaseException:
        client.close()
        raise


@contextmanager
def _shown_live(job: Job) -> Iterator[None]:
    """Display a job during the block, and update the display from a thread; do nothing outside of a Jupyter kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        yield
        return

    def update() -> None:
        with suppress(PenstockError):  # the waiting caller meets the error, if it lasts
            handle.update({"text/html": job._repr_html_(), "text/plain": repr(job)}, raw=True)

    def keep_updating() -> None:
        update()
        while not ended.wait(_LIVE_S):
            update()

    handle = import_module("IPython.display").display({"text/plain": f"<Job {job.id}>"}, raw=True, display_id=True)
    ended, thread = threading.Event(), threading.Thread(target=keep_updating, daemon=True)
    thread.start()
    try:
        yield
        ended.set()
        thread.join()
        update()
    finally:
        ended.set()
        thread.join(_LIVE_S)


def svg_curve(steps: Sequence[int], values: Sequence[float | None]) -> str:
    """Return an inline SVG of a curve, with its first and last value; '' if there are fewer than two values."""
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
