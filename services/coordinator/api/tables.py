"""Columns of metrics as CSV and Parquet, one row per step."""

from __future__ import annotations

import csv
import io
from typing import Any

from penstock.services.coordinator.api.replies import HttpProblem

__all__ = ["CSV", "PARQUET", "as_csv", "as_parquet"]

CSV = "text/csv"
PARQUET = "application/vnd.apache.parquet"


def as_csv(found: dict[str, Any]) -> bytes:
    """A header line and a line per step; an empty cell where a step has no value."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", "wall", *found["series"]])
    writer.writerows(zip(found["steps"], found["wall"], *found["series"].values(), strict=True))
    return text.getvalue().encode()


def as_parquet(found: dict[str, Any]) -> bytes:
    """A table with the columns ``step`` (int64), ``wall`` and one per series (float64, null where a step has none).

    Raises:
        HttpProblem: 406, the coordinator runs without pyarrow.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        detail = "Parquet needs pyarrow beside the coordinator (pip install 'penstock[data]'); ask for CSV or JSON"
        raise HttpProblem(406, "not_acceptable", detail) from None
    series = {name: pyarrow.array(values, pyarrow.float64()) for name, values in found["series"].items()}
    table = pyarrow.table(
        {
            "step": pyarrow.array(found["steps"], pyarrow.int64()),
            "wall": pyarrow.array(found["wall"], pyarrow.float64()),
            **series,
        }
    )
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()
