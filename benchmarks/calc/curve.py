"""Curves over wall time, and the figure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Curve", "Seed", "draw"]


@dataclass
class Curve:
    """Greedy exact match at points of wall time; ``steps`` are policy updates or supervised steps."""

    name: str
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, seconds: float, step: int, value: float) -> None:
        """Append one point."""
        self.seconds.append(seconds)
        self.steps.append(step)
        self.values.append(value)


@dataclass
class Seed:
    """All arms of one seed; every curve starts at the same version 0."""

    seed: int
    rl: list[Curve]
    supervised: list[Curve]


def draw(seeds: list[Seed], path: Path) -> None:
    """One panel per seed: accuracy over wall seconds since version 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(seeds), figsize=(4.2 * len(seeds), 3.4), sharey=True, squeeze=False)
    for axis, seed in zip(axes[0], seeds, strict=True):
        for curve in (*seed.rl, *seed.supervised):
            style = "--" if curve in seed.supervised else "-"
            axis.plot(curve.seconds, [100 * value for value in curve.values], style, marker=".", label=curve.name)
        axis.set_title(f"seed {seed.seed}")
        axis.set_xlabel("wall seconds since version 0")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out greedy exact match, %")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
