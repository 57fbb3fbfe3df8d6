"""Rows from files: JSONL, Parquet, and directories written by ``datasets.Dataset.save_to_disk``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from penstock.shared.config.service import load_settings
from penstock.shared.errors import DataError

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "FILES", "MODEL", "ROWS", "ArrowRows", "JsonLinesRows", "is_uploaded", "open_file",
    "place_of", "read_json_lines",
]  # fmt: skip


class JsonLinesRows:
    """JSON objects, one per line. Each line is parsed at opening, stored as bytes, and parsed again on access."""

    endless = False
    notes: tuple[str, ...] = ()

    def __init__(self, name: str, lines: list[tuple[int, bytes]]) -> None:
        self.name = name
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = orjson.loads(self._lines[index][1])
        return row

    def where(self, index: int) -> str:
        """Return file and line number, from 1."""
        return f"{self.name}, line {self._lines[index][0]}"


class ArrowRows:
    """Rows of an Arrow table (Parquet or a `datasets` directory)."""

    endless = False
    notes: tuple[str, ...] = ()

    def __init__(self, name: str, table: pyarrow.Table) -> None:
        self.name = name
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def where(self, index: int) -> str:
        """Return the file and the row number for error messages; rows are counted from 1, as lines are."""
        return f"{self.name}, row {index + 1}"


FILES, ROWS, MODEL = "files", "rows.jsonl", "model"
"""Uploads in the data directory: ``files/ID/rows.jsonl`` has the rows of a data set, ``files/ID/model`` is a model."""
_UPLOADED = re.compile(r"file-[0-9a-f]{32}", re.ASCII)


def is_uploaded(path: str) -> bool:
    """Return True if a path in a job file is the id of an uploaded data set or model."""
    return _UPLOADED.fullmatch(path) is not None


def place_of(path: str) -> Path:
    """Return the path on this host for ``path`` in a job file. If ``path`` is the id of an uploaded data set, return
    the path of its rows."""
    return load_settings().data_dir / FILES / path / ROWS if is_uploaded(path) else Path(path)


def open_file(path: Path, limit: int | None = None) -> JsonLinesRows | ArrowRows:
    """Open a directory, or a file in the format that its suffix shows; ``limit`` keeps only the first rows.

    Raises:
        DataError: the file is missing, empty or of an unknown type, or its content does not fit its suffix.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; the path must exist on every host that reads the data")
    if path.is_dir():
        return ArrowRows(str(path), _not_empty(path, _read_dataset_directory(path), limit))
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonLinesRows(str(path), read_json_lines(path, limit))
    if path.suffix == ".parquet":
        return ArrowRows(str(path), _not_empty(path, _read_parquet(path), limit))
    raise DataError(f"{path}: unknown kind of file '{path.suffix}'; use .jsonl, .parquet or a `datasets` directory")


def read_json_lines(path: Path, limit: int | None = None) -> list[tuple[int, bytes]]:
    """Return ``(line number, line)`` of each line that is not blank, all checked to be JSON objects.

    Raises:
        DataError: the file cannot be read or is empty, or a line is not a JSON object.
    """
    lines: list[tuple[int, bytes]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _check_line(path, number, line)
                    lines.append((number, line))
                if limit is not None and len(lines) == limit:
                    break
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not lines:
        raise DataError(f"{path}: holds no rows")
    return lines


def _check_line(path: Path, number: int, line: bytes) -> None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}, line {number}: a row must be a JSON object, found {type(value).__name__}")


def _not_empty(path: Path, table: pyarrow.Table, limit: int | None) -> pyarrow.Table:
    if not table.num_rows:
        raise DataError(f"{path}: holds no rows")
    return table if limit is None else table.slice(0, limit)


def _read_parquet(path: Path) -> pyarrow.Table:
    arrow = _arrow(path)
    from pyarrow import parquet

    try:
        return parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def _read_dataset_directory(path: Path) -> pyarrow.Table:
    """Concatenate the Arrow stream files listed in ``state.json``."""
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = ", ".join(_json_object(splits).get("splits", []))
        raise DataError(f"{path}: holds several splits ({names}); name one of these subdirectories")
    state = path / "state.json"
    if not state.exists():
        raise DataError(f"{path}: not a `datasets` directory (no state.json); write one with Dataset.save_to_disk")
    entries = _json_object(state).get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{state}: lists no data files")
    arrow = _arrow(path)
    tables = []
    for entry in entries:
        file = path / str(entry["filename"] if isinstance(entry, dict) and "filename" in entry else entry)
        try:
            with arrow.memory_map(str(file)) as mapped:
                tables.append(arrow.ipc.open_stream(mapped).read_all())
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable Arrow stream: {error}") from None
    return arrow.concat_tables(tables)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DataError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{path}: reading it needs the package pyarrow (extra `penstock[data]`)") from None
    import pyarrow.ipc  # makes `pyarrow.ipc` an attribute

    return pyarrow
