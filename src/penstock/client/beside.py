"""Files that a job file names by relative paths: code, data and models.

``path: ./reward.py:score`` becomes ``reward@SHA256:score``, and the file is uploaded before the job is submitted: the
job uses this content, even if the file changes later. JSON lines of at most MAX_ROWS_BYTES are uploaded too, and their
path becomes the id of the uploaded file. Other paths that begin with ``./`` or ``../`` are resolved against the folder
of the job file and not uploaded, so the services must see the same files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.errors import ConfigError

__all__ = ["MAX_CODE_BYTES", "MAX_ROWS_BYTES", "JobText", "read_job", "with_neighbours"]

MAX_CODE_BYTES = 256 << 10
"""Largest file of code."""
MAX_ROWS_BYTES = 16 << 20
"""Largest data set that is uploaded with the job; a larger one must be on a path that the services see."""
_FUNCTION = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")
_STEM = re.compile(r"[A-Za-z_]\w*")
_ROWS = frozenset({".jsonl", ".ndjson"})
"""Suffixes of files that are uploaded as data sets."""
_PATHS = frozenset({"path", "tokenizer", "exclude_path"})
"""Keys of job files that hold a path."""


@dataclass(frozen=True)
class JobText:
    """A job file as it is sent, and its uploads: Python sources by SHA-256, and files of rows.

    ``rows`` are absolute paths in ``data``; the ids of the uploaded files replace them.
    """

    data: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()

    def with_uploads(self, ids: Mapping[str, str]) -> JobText:
        """Return the job file with the ids of the uploaded files in place of their paths."""
        data = _each_text(self.data, lambda text: ids.get(text, text))
        assert isinstance(data, dict)
        return JobText(data, self.sources)


def read_job(file: Path, overrides: list[str] | None = None) -> JobText:
    """Read the job file at ``file`` and the files that it names by relative paths.

    Raises:
        ConfigError: the job file, or a file of code, cannot be read or is too long.
    """
    return with_neighbours(with_overrides(load_yaml(file), overrides or []), file.parent)


def with_neighbours(data: Mapping[str, Any], folder: Path) -> JobText:
    """Resolve the relative paths of a job file in ``folder``. Raises ConfigError as ``read_job`` does."""
    sources: dict[str, str] = {}
    rows: set[str] = set()
    changed = _changed(data, "", folder, sources, rows)
    assert isinstance(changed, dict)
    return JobText(changed, sources, frozenset(rows))


def _changed(value: Any, key: str, folder: Path, sources: dict[str, str], rows: set[str]) -> Any:
    if isinstance(value, Mapping):
        changed = {name: _changed(each, str(name), folder, sources, rows) for name, each in value.items()}
        if value.get("type") == "file" and _is_small_file_of_rows(value.get("path"), changed.get("path")):
            rows.add(changed["path"])
        return changed
    if isinstance(value, list):
        return [_changed(each, key, folder, sources, rows) for each in value]
    if not isinstance(value, str):
        return value
    if (found := _FUNCTION.fullmatch(value)) is not None and not value.startswith(("http:", "https:")):
        return _uploaded(found["file"], found["name"], folder, sources)
    if key in _PATHS and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value


def _is_small_file_of_rows(written: Any, path: Any) -> bool:
    if not isinstance(written, str) or written == path:  # no path, or not relative to the job file
        return False
    file = Path(path)
    return file.suffix in _ROWS and file.is_file() and file.stat().st_size <= MAX_ROWS_BYTES


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _each_text(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_each_text(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _uploaded(file: str, name: str, folder: Path, sources: dict[str, str]) -> str:
    path = folder / Path(file).expanduser()
    try:
        source = path.read_bytes()
        text = source.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}:{name}': cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(source) > MAX_CODE_BYTES:
        raise ConfigError(f"'{file}:{name}': {path} has {len(source)} bytes, more than {MAX_CODE_BYTES}")
    if not _STEM.fullmatch(path.stem):
        raise ConfigError(f"'{file}:{name}': the name of {path.name} must be that of a module, like reward.py")
    digest = hashlib.sha256(source).hexdigest()
    sources[digest] = text
    return f"{path.stem}@{digest}:{name}"
