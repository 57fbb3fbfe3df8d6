"""Allowed imports of the layers. The contracts of import-linter list forbidden imports; this test, allowed ones."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ALGORITHMS = Path(__file__).resolve().parents[2] / "shared" / "algorithms"
OWN = "penstock.shared.algorithms"


def imported(source: str) -> set[str]:
    """Return the full names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def foreign(source: str) -> list[str]:
    """Return the imports that are neither torch, nor in the standard library, nor in the algorithms package."""
    allowed = {"torch", *sys.stdlib_module_names}
    return sorted(
        name
        for name in imported(source)
        if name.partition(".")[0] not in allowed and name != OWN and not name.startswith(OWN + ".")
    )


@pytest.mark.parametrize("path", sorted(ALGORITHMS.glob("**/*.py")), ids=lambda path: str(path.name))
def test_the_mathematics_imports_nothing_but_torch(path: Path) -> None:
    assert foreign(path.read_text(encoding="utf-8")) == []


def test_a_foreign_import_is_found() -> None:
    source = "import math, numpy as np\nfrom torch import nn\ndef f():\n    from penstock.shared import config"
    assert foreign(source) == ["numpy", "penstock.shared"]
