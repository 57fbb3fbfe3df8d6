"""Imports functions and classes of the user, which a job file names by a dotted path."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.shared.config.service import load_settings
from penstock.shared.errors import PenstockError

__all__ = ["check_call", "code_path", "import_named", "read_uploaded", "shown_name"]

CODE = "code"
"""Folder of uploaded Python files, in the data directory."""


def code_path(data_dir: Path, digest: str) -> Path:
    """Return the path of the uploaded Python file whose SHA-256 is ``digest``."""
    return data_dir / CODE / f"{digest}.py"


def shown_name(path: str) -> str:
    """Return a readable name of code: ``file.py:name`` for an uploaded file, without its SHA-256; else ``path``."""
    module, _, name = path.rpartition(":")
    stem, at, _ = module.partition("@")
    return f"{stem}.py:{name}" if at else path


def import_named(path: str, *, what: str, beside: str, error: type[PenstockError]) -> Any:
    """Import the callable at ``package.module:name`` (or ``package.module.name``), or at ``file@SHA256:name`` in a file
    uploaded with the job. The import executes code of the user.

    Args:
        what: purpose of the code, for messages.
        beside: name of the service that imports the code, for messages.
        error: exception type to raise if the name does not exist or is not callable. Other exceptions of the user's
            module propagate unchanged.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if not module:
        raise error(f"{what} '{path}' names no module: write it like package.module:{name}")
    if "@" in module:
        source = _uploaded(module, what, beside, error)
        near = difflib.get_close_matches(name, [key for key, value in vars(source).items() if callable(value)], 1)
        return _callable(getattr(source, name, None), path, what, error, near)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as reason:
        searched = ", ".join(filter(None, sys.path[:3]))
        raise error(
            f"{what} '{path}' cannot be imported: {reason}; it must be installed beside the {beside} service or lie on "
            f"its PYTHONPATH (searched: {searched}, ...)"
        ) from reason
    return _callable(found, path, what, error)


def check_call(
    function: Callable[..., Any], what: str, shown: str, error: type[PenstockError], /, *args: Any, **named: Any
) -> None:
    """Check that ``function`` accepts ``args`` and ``named``, without calling it; some builtins cannot be checked.

    Raises:
        error: the code takes other arguments; the message calls the code ``what``, and the arguments ``shown``.
    """
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError as reason:
        raise error(f"{what} cannot be called with ({shown}): {reason}") from None
    except ValueError:  # it has no signature
        pass


def _callable(found: Any, path: str, what: str, error: type[PenstockError], near: Sequence[str] = ()) -> Any:
    if found is None:
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise error(f"{what} '{shown_name(path)}' does not exist, or is None{hint}")
    if not callable(found):
        raise error(f"{what} '{shown_name(path)}' is a {type(found).__name__}, not a function or class")
    return found


def read_uploaded(path: str, *, what: str, beside: str, error: type[PenstockError]) -> bytes:
    """Return the content of an uploaded file, which ``path`` names by ``file@SHA256`` or ``file@SHA256:name``.

    Args:
        what: purpose of the code, for messages.
        beside: name of the service that reads the file, for messages.
        error: exception type to raise if the file cannot be read, or is not what was uploaded.
    """
    stem, _, digest = path.partition(":")[0].partition("@")
    file = code_path(load_settings().data_dir, digest)
    try:
        source = file.read_bytes()
    except OSError as reason:
        raise error(
            f"{what} '{stem}.py' cannot be read beside the {beside} service: {reason.strerror}; it must see the data "
            f"directory of the coordinator ({file})"
        ) from None
    if hashlib.sha256(source).hexdigest() != digest:
        raise error(f"{what}: {file} is not what was uploaded: its SHA-256 differs")
    return source


def _uploaded(module: str, what: str, beside: str, error: type[PenstockError]) -> ModuleType:
    """Import an uploaded file as a module, under a name that no installed module has. Exceptions of the file's code
    propagate."""
    stem, _, digest = module.partition("@")
    name = f"penstock_code_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    source = read_uploaded(module, what=what, beside=beside, error=error)
    made = ModuleType(name)
    sys.modules[name] = made
    try:
        exec(compile(source, f"{stem}.py", "exec"), made.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return made
