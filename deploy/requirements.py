"""Print the requirements of the package and of the extras named on the command line, one per line.

Images install these before the source is copied, so that a change of code rebuilds nothing but the last layer.
Extras of the package itself (`penstock[torch,data]`) are expanded.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

__all__ = ["requirements"]


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirements of ``project`` (the pyproject table) with ``extras``, without duplicates, in order.

    Raises:
        KeyError: an extra does not exist.
    """
    name, optional = str(project["name"]), project["optional-dependencies"]
    assert isinstance(optional, dict)
    found: dict[str, None] = {}
    queue = [*_texts(project["dependencies"]), *(line for extra in extras for line in _texts(optional[extra]))]
    while queue:
        line = queue.pop(0)
        own = re.fullmatch(rf"{re.escape(name)}\[([^]]+)]", line)
        if own:
            queue += [text for extra in own[1].split(",") for text in _texts(optional[extra.strip()])]
        else:
            found[line] = None
    return list(found)


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    sys.stdout.write("\n".join(requirements(table, sys.argv[1:])) + "\n")
