"""Metric rows as columns, down-sampled. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.services.coordinator.thinning import largest_triangles

__all__ = ["columns", "metric_names"]


def columns(
    rows: Sequence[dict[str, Any]],
    *,
    names: list[str] | None,
    step_from: int | None,
    step_to: int | None,
    max_points: int,
) -> dict[str, Any]:
    """``{"steps", "wall", "series": {name: [...]}}``. Rows of one step are merged; a later row of a step wins.

    Down-sampling keeps the first and the last step and those between where the curves turn: a value shown was measured.
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
        order = [order[place] for place in largest_triangles(order, curves, max_points)]
    return {
        "steps": order,
        "wall": [steps[step]["wall"] for step in order],
        "series": {name: [steps[step].get(name) for step in order] for name in found},
    }


def metric_names(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``name``, ``count`` of rows that have it, first and last ``step``, ``last`` value; in the order of the names."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, value in row["values"].items():
            known = found.setdefault(name, {"name": name, "count": 0, "first_step": row["step"]})
            known |= {"count": known["count"] + 1, "last_step": row["step"], "last": value}
    return [found[name] for name in sorted(found)]
