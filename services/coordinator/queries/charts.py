"""Charts of a job: metric rows as columns, and the time spans of each update's stages.

Down-sampling preserves the shape of the curves, by largest-triangle-three-buckets (S. Steinarsson, "Downsampling Time
Series for Visual Representation", 2013) over several curves with one axis: the area of a step is the sum of its
triangles' areas in all curves, and each curve is scaled to its range.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.services.coordinator.jobs.store import JobStore
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import (
    BatchRefused,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Dropped,
    Event,
    LineageForked,
    decode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.runtime.ledger import LedgerArchive, read_ledger
from penstock.shared.transport.bus import Bus, Message

__all__ = ["Charts", "columns", "largest_triangles", "metric_names", "newest_evaluation", "thinned", "timeline"]

HELD_OUT = ("eval/success", "eval/return", "eval/length")


class Charts:
    """Reader of metrics and timelines. Every method raises NotFound (unknown job) and may raise Unavailable."""

    def __init__(self, bus: Bus, store: JobStore, archive: LedgerArchive) -> None:
        self._bus, self._store, self._archive = bus, store, archive

    async def metrics(
        self, job: str, *, names: list[str] | None, step_from: int | None, step_to: int | None, max_points: int
    ) -> dict[str, Any]:
        """Return ``{"steps": [int], "wall": [Unix seconds], "series": {name: [float | None]}}``; all of these lists are
        equally long.

        ``names`` None: all metrics. Bounds are inclusive. At most ``max_points`` steps, with the first and last kept.
        """
        wanted = partial(columns, names=names, step_from=step_from, step_to=step_to, max_points=max_points)
        messages = await self._metrics(job)
        return await asyncio.to_thread(lambda: wanted(_rows(messages)))

    async def names(self, job: str) -> list[dict[str, Any]]:
        """Return ``name``, ``count``, ``first_step``, ``last_step`` and ``last`` value of every metric."""
        messages = await self._metrics(job)
        return await asyncio.to_thread(lambda: metric_names(_rows(messages)))

    async def held_out(self, job: str) -> dict[str, Any] | None:
        """Return the newest evaluation of an embodied job; None if there is none yet, or if the job is of another
        kind."""
        if (await self._store.get(job)).spec.get("kind") != "embodied":
            return None
        messages = await self._metrics(job)
        return await asyncio.to_thread(lambda: newest_evaluation(_rows(messages)))

    async def timeline(self, job: str, *, step: int | None, limit: int) -> list[dict[str, Any]]:
        """Return the spans (``step``, ``stage``, ``start``, ``end``) of update ``step``; without ``step``, those of the
        newest ``limit`` updates."""
        await self._store.get(job)
        entries = await read_ledger(self._bus, job, self._archive)
        return await asyncio.to_thread(_timeline, [entry.data for entry in entries], step, limit)

    async def _metrics(self, job: str) -> list[Message]:
        await self._store.get(job)
        return await self._bus.read(subjects.METRICS, subjects.metrics(job))


def _rows(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(message.data) for message in messages]


def _timeline(entries: Sequence[bytes], step: int | None, limit: int) -> list[dict[str, Any]]:
    return timeline((event for data in entries for event in decode_events(data)), step=step, limit=limit)


def columns(
    rows: Sequence[dict[str, Any]],
    *,
    names: list[str] | None,
    step_from: int | None,
    step_to: int | None,
    max_points: int,
) -> dict[str, Any]:
    """Return ``{"steps", "wall", "series": {name: [...]}}`` of the metric rows. Rows of the same step are merged; a
    later row overrides the values of an earlier one.

    Down-sampling keeps the first and the last step, all values of curves with few of them (such as evaluations), and
    steps where the other curves turn. No value is interpolated.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = int(row["step"])
        if (step_from is not None and step < step_from) or (step_to is not None and step > step_to):
            continue
        merged = steps.setdefault(step, {"wall": row["time"]})
        merged.update({name: value for name, value in row["values"].items() if names is None or name in names})
    order = sorted(steps)
    found = sorted({name for step in order for name in steps[step]} - {"wall"})
    if len(order) > max_points > 1:
        curves = [[steps[step].get(name) for step in order] for name in found]
        order = [order[index] for index in thinned(order, curves, max_points)]
    return {
        "steps": order,
        "wall": [steps[step]["wall"] for step in order],
        "series": {name: [steps[step].get(name) for step in order] for name in found},
    }


def metric_names(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``name``, ``count`` of rows, first and last ``step`` and ``last`` value of each metric, sorted by name."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, value in row["values"].items():
            known = found.setdefault(name, {"name": name, "count": 0, "first_step": row["step"]})
            known |= {"count": known["count"] + 1, "last_step": row["step"], "last": value}
    return [found[name] for name in sorted(found)]


def newest_evaluation(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return ``step``, ``version`` and ``values`` (success, return, length, by metric name) of the last evaluation."""
    row = next((row for row in reversed(rows) if row["kind"] == "eval"), None)
    if row is None:
        return None
    values = {name: row["values"].get(name) for name in HELD_OUT}
    return {"step": row["step"], "version": row["version"], "values": values}


def thinned(steps: Sequence[int], curves: Sequence[Sequence[float | None]], max_points: int) -> list[int]:
    """Return ascending indices of at most ``max_points`` >= 2 steps; the first and the last step are always kept.

    Up to half of them are all steps of the curves with the fewest values; ``largest_triangles`` chooses the others.
    """
    kept: set[int] = set()
    for known in sorted(([i for i, value in enumerate(curve) if value is not None] for curve in curves), key=len):
        if len(kept.union(known)) > max_points // 2 or max_points < 4:
            break
        kept.update(known)
    return sorted(kept.union(largest_triangles(steps, curves, max_points - len(kept))))


def largest_triangles(steps: Sequence[int], curves: Sequence[Sequence[float | None]], max_points: int) -> list[int]:
    """Thin out ``steps`` by the algorithm Largest-Triangle-Three-Buckets: return ascending indices of at most
    ``max_points`` >= 2 steps, always with the first and the last step.

    A curve without a value at an index contributes no triangle there.
    """
    count = len(steps)
    if count <= max_points:
        return list(range(count))
    if max_points == 2:
        return [0, count - 1]
    x_N = np.asarray(steps, np.float64)
    y_CN = np.array([_scaled(curve) for curve in curves]) if curves else np.zeros((1, count))
    edges = np.linspace(1, count - 1, max_points - 1).astype(np.int64)
    chosen = [0]
    for bucket in range(max_points - 2):
        start, stop = int(edges[bucket]), int(edges[bucket + 1])
        end = int(edges[bucket + 2]) if bucket + 2 < len(edges) else count
        chosen.append(start + _largest(x_N, y_CN, chosen[-1], slice(start, stop), slice(stop, max(end, stop + 1))))
    return [*chosen, count - 1]


def _largest(x_N: NDArray[np.float64], y_CN: NDArray[np.float64], last: int, here: slice, after: slice) -> int:
    """Return the index within ``here`` of the step whose triangles are largest, summed over all curves. The corners of
    a triangle are the step itself, the step ``last``, and the mean of the steps in ``after``."""
    later_C = _means(y_CN[:, after])
    base, later = x_N[last], x_N[after].mean()
    area_CK = np.abs(
        (base - later) * (y_CN[:, here] - y_CN[:, [last]]) - (base - x_N[here]) * (later_C - y_CN[:, [last]])
    )
    return int(np.nansum(area_CK, axis=0).argmax())


def _means(y_CK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the values of each curve, [C, 1]; NaN for a curve without values."""
    known_CK = np.isfinite(y_CK)
    num_C = known_CK.sum(axis=1, keepdims=True)
    total_C = np.where(known_CK, y_CK, 0.0).sum(axis=1, keepdims=True)
    return np.where(num_C > 0, total_C / np.maximum(num_C, 1), np.nan)


def _scaled(curve: Sequence[float | None]) -> NDArray[np.float64]:
    """Scale values to [0, 1]; NaN for missing values."""
    y_N = np.array([np.nan if value is None else value for value in curve], np.float64)
    known_N = np.isfinite(y_N)
    if not known_N.any():
        return np.full(len(y_N), np.nan)
    low, high = y_N[known_N].min(), y_N[known_N].max()
    y_N[~known_N] = np.nan
    return (y_N - low) / (high - low) if high > low else np.where(known_N, 0.0, np.nan)


def timeline(events: Iterable[Event], *, step: int | None, limit: int = 20) -> list[dict[str, Any]]:
    """Return the spans of update ``step`` for a Gantt chart. Without ``step``, return those of the newest ``limit``
    updates, oldest update first.

    A span has ``step``, ``stage``, ``start`` and ``end`` (Unix seconds of the leader's clock). Stages: ``generate``
    (first draw until the batch was sealed), ``wait`` (sealed batch, while the trainer worked on the previous one),
    ``train``, ``checkpoint`` (of the resulting state, until it was durable).
    """
    asked: dict[Draw, float] = {}
    sealed: dict[int, BatchSealed] = {}
    spans: dict[int, list[dict[str, Any]]] = {}
    free = 0.0
    for event in events:
        match event:
            case Drawn():
                asked |= {Draw(ordinal): event.time for ordinal in range(event.start, event.stop)}
            case Dropped() if event.redraw:
                asked |= {draw.again(): event.time for draw in event.draws}
            case BatchRefused() if event.redraw:
                asked |= {draw.again(): event.time for draw in event.bad}
            case LineageForked():
                free = event.time
            case BatchSealed():
                sealed[event.number] = event
            case BatchTrained():
                batch = sealed.pop(event.number)
                begun = min((asked.pop(g.draw, batch.time) for g in batch.groups), default=batch.time)
                start = max(batch.time, free)
                spans[event.number] = [
                    _span(event.number, "generate", begun, batch.time),
                    *([_span(event.number, "wait", batch.time, start)] if start > batch.time else []),
                    _span(event.number, "train", start, event.time),
                ]
                free = event.time
            case Checkpointed() if event.number in spans:
                end_of_training = spans[event.number][-1]["end"]
                spans[event.number].append(_span(event.number, "checkpoint", end_of_training, event.time))
            case _:
                pass
    chosen = [step] if step is not None else sorted(spans)[-limit:]
    return [span for number in chosen for span in spans.get(number, [])]


def _span(step: int, stage: str, start: float, end: float) -> dict[str, Any]:
    return {"step": step, "stage": stage, "start": start, "end": end}
