"""Allowed imports of the layers. The contracts of import-linter list forbidden imports; this test, allowed ones."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = ROOT / "shared" / "algorithms"
COORDINATOR = ROOT / "services" / "coordinator"
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


def chain_of(node: ast.expr) -> list[str]:
    """Return the names in ``a.b[0].c`` from left to right."""
    match node:
        case ast.Attribute():
            return [*chain_of(node.value), node.attr]
        case ast.Subscript() | ast.Starred():
            return chain_of(node.value)
        case ast.Name():
            return [node.id]
        case _:
            return []


def written(source: str) -> list[str]:
    """Return the fields of runs, or of what a run holds, that a file assigns or deletes.

    A run is a variable or field called ``run``, or a parameter with the type ``JobRun`` or ``RunFacts``.
    """
    tree, found = ast.parse(source), []
    typed = {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg) and a.annotation is not None
             and ast.unparse(a.annotation).strip("'\"") in ("JobRun", "RunFacts")}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            chain = chain_of(node)
            owners = chain[:-1] if isinstance(node, ast.Attribute) else chain
            if "run" in owners or typed & set(owners[:1]):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and chain_of(node.func)[-1:] in (["setattr"], ["delattr"], ["__setattr__"]):
            chain = [name for one in node.args[:1] for name in chain_of(one)]
            if "run" in chain or typed & set(chain[:1]):
                found.append(ast.unparse(node))
    return sorted(found)


def test_only_a_run_writes_its_fields() -> None:
    """A decision gets facts from outside as ``Inputs``; methods of the run change the rest."""
    files = [path for path in COORDINATOR.rglob("*.py") if path != COORDINATOR / "training" / "run.py"]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): written(path.read_text(encoding="utf-8")) for path in files}
    assert {path: fields for path, fields in found.items() if fields} == {}


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("self.run.desired = 'paused'", ["self.run.desired"]),
        ("a, run.new_best = 1, ''", ["run.new_best"]),
        ("run.promotion.forced: int = 1", ["run.promotion.forced"]),
        ("run.stored_bytes += 1\ndel run.stored[1]", ["run.stored[1]", "run.stored_bytes"]),
        ("def steer(one: JobRun) -> None:\n    one.asked = None", ["one.asked"]),
        ("setattr(self.run, name, 1)", ["setattr(self.run, name, 1)"]),
        ("self.run = JobRun()\nrun = self.run\nself.run.fail(error)\nfound = run.stored[1]", []),
    ],
)
def test_a_write_to_a_run_is_found(source: str, fields: list[str]) -> None:
    assert written(source) == fields
