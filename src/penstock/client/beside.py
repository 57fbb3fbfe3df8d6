"""Neighbours of a job file: code that it names by a relative path, and data and models on this machine.

``path: ./reward.py:score`` becomes ``reward@SHA256:score``, and the file is uploaded before the job is submitted: the
job stands for this content, whatever becomes of the file. Paths that begin with ``./`` or ``../`` are seen from the
folder of the job file; nothing is uploaded of them, so the services must see the same files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.errors import ConfigError

__all__ = ["MAX_CODE_BYTES", "JobText", "read_job"]

MAX_CODE_BYTES = 256 << 10
"""Of one file of code."""
_FUNCTION = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")
_STEM = re.compile(r"[A-Za-z_]\w*")
_PATHS = frozenset({"path", "tokenizer", "exclude_path"})
"""Keys of job files that hold a path."""


@dataclass(frozen=True)
class JobText:
    """A job file as it is sent, and the files of Python that it names: source by SHA-256."""

    data: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)


def read_job(file: Path, overrides: list[str] | None = None) -> JobText:
    """The job file at ``file``, with what lies beside it.

    Raises:
        ConfigError: it, or a file of code that it names, cannot be read or is too long.
    """
    return with_neighbours(with_overrides(load_yaml(file), overrides or []), file.parent)


def with_neighbours(data: Mapping[str, Any], folder: Path) -> JobText:
    """A job file that lies in ``folder``. Raises ConfigError, see ``read_job``."""
    sources: dict[str, str] = {}
    changed = _changed(data, "", folder, sources)
    assert isinstance(changed, dict)
    return JobText(changed, sources)


def _changed(value: Any, key: str, folder: Path, sources: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _changed(each, str(name), folder, sources) for name, each in value.items()}
    if isinstance(value, list):
        return [_changed(each, key, folder, sources) for each in value]
    if not isinstance(value, str):
        return value
    if (found := _FUNCTION.fullmatch(value)) is not None and not value.startswith(("http:", "https:")):
        return _uploaded(found["file"], found["name"], folder, sources)
    if key in _PATHS and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value


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
