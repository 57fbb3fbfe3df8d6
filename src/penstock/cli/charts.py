"""Curves in a terminal, drawn with the dots of braille characters: two columns and four rows in each cell."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cli.printing import number

__all__ = ["chart"]

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot in row 0 to 3, column 0 to 1 of a cell."""


def chart(
    name: str, steps: Sequence[int], values: Sequence[float | None], *, width: int = 72, height: int = 10
) -> list[str]:
    """The lines of a chart of ``values`` over ``steps``: its name, ``height`` rows of ``width`` cells, the axis.

    Where there are more values than columns of dots, a column shows the span of those that fall into it.
    """
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not known:
        return [f"{name}: nothing yet"]
    low, high = min(value for _, value in known), max(value for _, value in known)
    first, last = known[0][0], known[-1][0]
    columns, rows = 2 * width, 4 * height
    span = last - first or 1
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for step, value in known:
        column = round((step - first) / span * (columns - 1))
        row = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        top, bottom = (row, row) if before is None else (min(row, before), max(row, before))
        for place in range(top, bottom + 1):
            cells[place // 4][column // 2] |= _DOTS[place % 4][column % 2]
        before = row
    labels = [number(high), *[""] * (height - 2), number(low)] if height > 1 else [number(high)]
    margin = max(map(len, labels))
    lines = [f"{name}: {number(known[-1][1])}"]
    for label, row_cells in zip(labels, cells, strict=True):
        text = "".join(chr(_BLANK + bits) for bits in row_cells).rstrip(chr(_BLANK))
        lines.append(f"{label:>{margin}} ┤{text}")
    ends = f"{first}{last:>{max(1, width - len(str(first)))}}"
    return [*lines, f"{'':>{margin}} └{ends}"]
