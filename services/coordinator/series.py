"""Metric rows as columns, down-sampled. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["columns"]


def columns(
    rows: Sequence[dict[str, Any]],
    *,
    names: list[str] | None,
    step_from: int | None,
    step_to: int | None,
    max_points: int,
) -> dict[str, Any]:
    """``{"steps", "wall", "series": {name: [...]}}``. Rows of one step are merged; a later row of a step wins.

    Down-sampling keeps the first and the last step and evenly spaced ones between: a value shown was measured.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = int(row["step"])
        if (step_from is not None and step < step_from) or (step_to is not None and step > step_to):
            continue
        merged = steps.setdefault(step, {"wall": row["time"]})
        merged.update({name: value for name, value in row["values"].items() if names is None or name in names})
    order = sorted(steps)
    if len(order) > max_points > 1:
        last = len(order) - 1
        order = [order[round(i * last / (max_points - 1))] for i in range(max_points)]
    found = sorted({name for step in order for name in steps[step]} - {"wall"})
    return {
        "steps": order,
        "wall": [steps[step]["wall"] for step in order],
        "series": {name: [steps[step].get(name) for step in order] for name in found},
    }
