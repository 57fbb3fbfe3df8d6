"""Curves of runs: a panel for each number, a colour for each arm, a line for each seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from length.task import Run

__all__ = ["draw"]


def draw(runs: list[Run], arms: Sequence[str], panels: Mapping[str, str], path: Path, window: int = 5) -> None:
    """Means of ``window`` updates of the fields that ``panels`` names, over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 4), squeeze=False)
    for axis, (name, label) in zip(axes[0], panels.items(), strict=True):
        for run in runs:
            series = [(i, getattr(lengths, name)) for i, lengths in enumerate(run.updates)]
            points = [(i, value) for i, value in series if value is not None]
            x = [i for i, _ in points[window - 1 :]]
            y = [statistics.fmean(v for _, v in points[i : i + window]) for i in range(len(points) - window + 1)]
            first = run is next(r for r in runs if r.arm == run.arm)
            colour = f"C{arms.index(run.arm)}"
            axis.plot(x, y, color=colour, alpha=0.8, linewidth=1, label=run.arm if first else None)
        axis.set_xlabel("updates")
        axis.set_ylabel(f"{label}, mean of {window} updates")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
