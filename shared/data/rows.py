"""Rows of a data source: an indexable table of plain dictionaries, opened from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock.shared.config.data import AdditionSource, CalculatorSource, SortingSource, Source, TasksSource
from penstock.shared.data.addition import AdditionRows
from penstock.shared.data.calculator import open_calculator
from penstock.shared.data.files import open_file, place_of
from penstock.shared.data.sorting import SortingRows
from penstock.shared.data.tasks import TaskRows

__all__ = ["Rows", "check_rows", "open_rows"]


class Rows(Protocol):
    """Table of rows. Reading an index twice gives equal rows, in every process."""

    @property
    def name(self) -> str:
        """Name of the source for messages: a path or a short description."""

    @property
    def endless(self) -> bool:
        """True if indices at and above ``len`` are also valid and give further rows."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Descriptions of parts of the source that were left out at opening."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """Return the location of a row for error messages, like `train.jsonl, line 7`."""


def open_rows(source: Source, *, seed: int = 0) -> Rows:
    """Open one source. ``seed`` is used by generators only. Reads the whole source: call it off the event loop.

    Raises:
        DataError: the file is missing or empty, or a line is not a row; the text names file and line.
    """
    if isinstance(source, AdditionSource):
        return AdditionRows(source, seed)
    if isinstance(source, SortingSource):
        return SortingRows(source, seed)
    if isinstance(source, CalculatorSource):
        return open_calculator(source)
    if isinstance(source, TasksSource):
        return TaskRows(source)
    return open_file(place_of(source.path), source.limit)


def check_rows(rows: Rows, use: Callable[[dict[str, Any], str], object], *, first: int | None = None) -> None:
    """Call ``use(row, where)`` for every row; ``use`` raises if it finds an error. If the number ``first`` is given,
    stop after that many rows."""
    for index in range(len(rows) if first is None else min(first, len(rows))):
        use(rows[index], rows.where(index))
