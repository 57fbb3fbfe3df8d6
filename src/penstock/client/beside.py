"""Files that a job file names by relative paths: code, data and models.

``path: ./reward.py:score`` becomes ``reward@SHA256:score``, and the file is uploaded before the job is submitted: the
job uses this content, even if the file changes later. A Python grader names only its file, ``path: ./grade.py``,
because its function is always ``grade``. An environment of ``verifiers`` names the file of its taskset. Data sets (JSON
lines, Parquet) and the folder of ``model.path`` are uploaded too if they have at most MAX_UPLOAD_BYTES, and their path
becomes the id of the upload. Other paths that begin with ``./`` or ``../`` are resolved against the folder of the job
file and not uploaded, so the services must see the same files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.config.model import MAX_MODEL_FILES, MODEL_FILE
from penstock.shared.errors import ConfigError

__all__ = [
    "MAX_CODE_BYTES", "MAX_UPLOAD_BYTES", "CodeFile", "JobText", "files_of_model", "read_job", "read_rows",
    "with_neighbours", "with_sources",
]  # fmt: skip

MAX_CODE_BYTES = 256 << 10
"""Maximum size of a file of code (bytes)."""
MAX_UPLOAD_BYTES = 16 << 20
"""Maximum size of a data set or model that is uploaded with a job (bytes). A larger one must be on a path that the
services see."""
_FUNCTION = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")
_GRADE = "grade"
"""Function that the file of a Python grader defines."""
_GRADER_FILE = re.compile(rf"(?P<file>[^:]+\.py)(:{_GRADE})?")
_TASKSET_FILE = re.compile(r"[^:]+\.py")
_STEM = re.compile(r"[A-Za-z_]\w*")
_LINES, _PARQUET = frozenset({".jsonl", ".ndjson"}), ".parquet"
"""Suffixes of files that are uploaded as data sets."""
_MODEL = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model"})
_NOTES = frozenset({".md", ""})
"""Suffixes of files of a model: uploaded (``_MODEL``), and left out (``_NOTES``; '': files like ``.gitattributes``)."""
_PATHS = frozenset({"path", "tokenizer", "exclude_path", "teacher", "demonstrations"})
"""Keys of job files that hold a path."""


class CodeFile(NamedTuple):
    """Python file that a job file names: its path as written there, and its content."""

    file: str
    source: str


@dataclass(frozen=True)
class JobText:
    """A job file as it is sent, and its uploads: Python files (``sources``, keyed by SHA-256), data sets, and folders
    of models.

    ``rows`` (data sets) and ``models`` are absolute paths that occur in ``data``. After the uploads, ``with_uploads``
    replaces the paths by the ids of the uploads.
    """

    data: dict[str, Any]
    sources: dict[str, CodeFile] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()

    def with_uploads(self, ids: Mapping[str, str]) -> JobText:
        """Return the job file with the ids of the uploaded files in place of their paths."""
        of_rows = {path: ids[path] for path in self.rows if path in ids}
        data = _each_text(self.data, lambda text: of_rows.get(text, text))
        assert isinstance(data, dict)
        if self.models:
            data["model"] = _each_text(data["model"], lambda text: ids.get(text, text))
        return replace(self, data=data, rows=frozenset(), models=frozenset())


def read_job(file: Path, overrides: list[str] | None = None) -> JobText:
    """Read the job file at ``file``, apply ``overrides`` (``a.b=value``), and read the code that it names.

    Raises:
        ConfigError: the job file, or a file of code, cannot be read or is too long.
    """
    return with_neighbours(with_overrides(load_yaml(file), overrides or []), file.parent)


def with_neighbours(data: Mapping[str, Any], folder: Path) -> JobText:
    """Return a job file with relative paths resolved against ``folder``. Raises ConfigError as ``read_job`` does."""
    sources: dict[str, CodeFile] = {}
    rows: set[str] = set()
    changed = _changed(data, "", folder, sources, rows)
    assert isinstance(changed, dict)
    models = {path for path in _relative_paths(data.get("model"), changed.get("model")) if files_of_model(Path(path))}
    return JobText(changed, sources, frozenset(rows), frozenset(models))


def _changed(value: Any, key: str, folder: Path, sources: dict[str, CodeFile], rows: set[str]) -> Any:
    if isinstance(value, Mapping):
        if (grade := _file_of_grader(value)) is not None:
            value = {**value, "path": f"{_uploaded(grade, folder, sources)}:{_GRADE}"}
        elif (taskset := _file_of_taskset(value)) is not None:
            value = {**value, "path": _uploaded(taskset, folder, sources)}
        changed = {name: _changed(each, str(name), folder, sources, rows) for name, each in value.items()}
        if value.get("type") == "file":
            rows.update(path for path in _relative_paths(value, changed) if _is_small_file_of_rows(Path(path)))
        return changed
    if isinstance(value, list):
        return [_changed(each, key, folder, sources, rows) for each in value]
    if not isinstance(value, str):
        return value
    if (found := _FUNCTION.fullmatch(value)) is not None and not value.startswith(("http:", "https:")):
        return f"{_uploaded(found['file'], folder, sources)}:{found['name']}"
    if key in _PATHS and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value


def _relative_paths(written: Any, changed: Any) -> list[str]:
    """Return a list with the path under the key ``path`` of a section, made absolute, if the job file has a relative
    path there. Otherwise return an empty list.

    ``written`` is the section in the job file, ``changed`` is the same section with absolute paths.
    """
    if not isinstance(written, Mapping) or not isinstance(path := written.get("path"), str):
        return []
    return [] if path == changed["path"] else [changed["path"]]


def _is_small_file_of_rows(file: Path) -> bool:
    return file.suffix in {*_LINES, _PARQUET} and file.is_file() and file.stat().st_size <= MAX_UPLOAD_BYTES


def read_rows(file: Path) -> bytes | None:
    """Read a data set as JSON lines; return None if it is a Parquet file that cannot be converted to JSON lines.

    Reasons: pyarrow is missing, JSON cannot express a value (bytes, times, decimals, NaN), or the lines exceed
    MAX_UPLOAD_BYTES.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file.suffix != _PARQUET:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    lines, size = [], 0
    try:
        for batch in import_module("pyarrow.parquet").ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                lines.append(json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n")
                size += len(lines[-1])
            if size > MAX_UPLOAD_BYTES:
                return None
    except (ImportError, OSError, ValueError, TypeError, NotImplementedError):  # of pyarrow, or of a value without JSON
        return None
    return b"".join(lines)


def files_of_model(folder: Path) -> list[Path]:
    """Return the files of the Hugging Face model in ``folder``, sorted by name; [] if they cannot be uploaded.

    They cannot if ``folder`` holds no model, exceeds MAX_UPLOAD_BYTES or MAX_MODEL_FILES, or holds other files: code,
    pickled weights, folders.
    """
    if not (folder / "config.json").is_file():
        return []
    inside = sorted(folder.iterdir())
    files = [path for path in inside if path.suffix in _MODEL]
    if any(path.suffix not in _MODEL | _NOTES or not path.is_file() for path in inside):
        return []
    if len(files) > MAX_MODEL_FILES or not all(MODEL_FILE.fullmatch(path.name) for path in files):
        return []
    return files if sum(path.stat().st_size for path in files) <= MAX_UPLOAD_BYTES else []


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _each_text(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_each_text(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def with_sources(grader: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a grader with the source code in place of each file that it names, relative to ``folder``. Raises
    ConfigError as ``read_job`` does."""
    return dict(_with_sources(grader, folder))


def _with_sources(value: Any, folder: Path) -> Any:
    if not isinstance(value, Mapping):
        return value
    if (grade := _file_of_grader(value)) is None or "source" in value:
        return {key: _with_sources(each, folder) for key, each in value.items()}
    return {key: each for key, each in value.items() if key != "path"} | {"source": _read_code(grade, folder)}


def _file_of_grader(section: Mapping[str, Any]) -> str | None:
    """Return the path of the file that ``section`` names if it is a Python grader with a file, otherwise None."""
    path = section.get("path")
    if section.get("type") != "python" or not isinstance(path, str):
        return None
    found = _GRADER_FILE.fullmatch(path)
    return None if found is None else found["file"]


def _file_of_taskset(section: Mapping[str, Any]) -> str | None:
    """Return the path of the file that ``section`` names if it is an environment of `verifiers` with a file, otherwise
    None."""
    path = section.get("path")
    named = section.get("type") == "verifiers" and isinstance(path, str) and _TASKSET_FILE.fullmatch(path)
    return path if named else None


def _uploaded(file: str, folder: Path, sources: dict[str, CodeFile]) -> str:
    """Add a Python file to ``sources``; return its name, ``stem@SHA256``."""
    source, stem = _read_code(file, folder), Path(file).stem
    digest = hashlib.sha256(source.encode()).hexdigest()
    sources[digest] = CodeFile(file, source)
    return f"{stem}@{digest}"


def _read_code(file: str, folder: Path) -> str:
    """Return the content of a Python file, given relative to ``folder``. Raises ConfigError."""
    path = folder / Path(file).expanduser()
    try:
        source = path.read_bytes()
        text = source.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}': cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(source) > MAX_CODE_BYTES:
        raise ConfigError(f"'{file}': {path} has {len(source)} bytes, more than {MAX_CODE_BYTES}")
    if not _STEM.fullmatch(path.stem):
        raise ConfigError(f"'{file}': the name of {path.name} must be that of a module, like reward.py")
    return text
