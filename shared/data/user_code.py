"""Objects that a job file names by a dotted path: functions and classes of the user."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from penstock.shared.errors import PenstockError

__all__ = ["import_named"]


def import_named(path: str, *, what: str, beside: str, error: type[PenstockError]) -> Any:
    """The callable at ``package.module:name`` (or ``package.module.name``). The import itself runs code of the user.

    Args:
        what: what it is for, in messages.
        beside: the service that imports it.
        error: what is raised where there is nothing of that name to be imported, or it is not callable. Whatever else
            the user's module raises is left as it is.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if not module:
        raise error(f"{what} '{path}' names no module: write it like package.module:{name}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as reason:
        searched = ", ".join(filter(None, sys.path[:3]))
        raise error(
            f"{what} '{path}' cannot be imported: {reason}; it must be installed beside the {beside} service or lie on "
            f"its PYTHONPATH (searched: {searched}, ...)"
        ) from None
    if not callable(found):
        raise error(f"{what} '{path}' is a {type(found).__name__}, not a function or class")
    return found
