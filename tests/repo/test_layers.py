"""Allowed imports of the layers: import-linter's contracts name what is forbidden, this one what is allowed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ALGORITHMS = Path(__file__).resolve().parents[2] / "shared" / "algorithms"
OWN = "penstock.shared.algorithms"


def imported(source: str) -> set[str]:
    """Full names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def foreign(source: str) -> list[str]:
    """Imports that are neither torch's, nor Python's, nor of the mathematics itself."""
    allowed = {"torch", *sys.stdlib_module_names}
    return sorted(
        name
        for name in imported(source)
        if name.partition(".")[0] not in allowed and name != OWN and not name.startswith(OWN + ".")
    )


@pytest.mark.parametrize("path", sorted(ALGORITHMS.glob("**/*.py")), ids=lambda path: str(path.name))
def test_the_mathematics_imports_nothing_but_torch(path: Path) -> None:
    assert foreign(path.read_text(encoding="utf-8")) == []


def test_what_does_not_belong_there_is_seen() -> None:
    source = "import math, numpy as np\nfrom torch import nn\ndef f():\n    from penstock.shared import config"
    assert foreign(source) == ["numpy", "penstock.shared"]
