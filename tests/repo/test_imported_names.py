"""Names of the package that examples, tools of the manual and programs on its pages use exist.

mypy checks ``src/penstock`` and ``benchmarks``; this test looks at the programs beside them, which few tests execute.
"""

from __future__ import annotations

import ast
import json
from importlib import import_module
from pathlib import Path

import pytest

from tests.manual import PAGES, ROOT, snippets

FOLDERS = ("docs", "examples", "deploy")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))


def code_of(notebook: Path) -> str:
    """Return the cells with code of a notebook, as one program."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
SOURCES |= {str(path.relative_to(ROOT)): code_of(path) for path in NOTEBOOKS}
SOURCES |= {
    f"{page}-{place}": one.text.replace("[…]", "[...]")
    for page in PAGES
    for place, one in enumerate(snippets(page))
    if one.kind == "python"
}


def used(source: str) -> set[str]:
    """Return the dotted names that a program takes from ``penstock``: by imports, or as ``penstock.name``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return {name for name in found if name.partition(".")[0] == "penstock"}


def exists(name: str) -> bool:
    """Return True if a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    if not module or hasattr(import_module(module), attribute):
        return True
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return False
    return True


@pytest.mark.parametrize("place", [place for place, source in SOURCES.items() if used(source)])
def test_names_that_a_program_takes_from_the_package_exist(place: str) -> None:
    assert [name for name in sorted(used(SOURCES[place])) if not exists(name)] == []


def test_names_that_do_not_exist_are_found() -> None:
    source = "import penstock\nfrom penstock import shared\nfrom penstock.client import Client, Klient\npenstock.tain()"
    names = {"penstock", "penstock.shared", "penstock.client.Client", "penstock.client.Klient", "penstock.tain"}
    assert used(source) == names
    assert {name for name in names if not exists(name)} == {"penstock.client.Klient", "penstock.tain"}
    assert "penstock.train" in used(SOURCES["examples/notebook.ipynb"])
    assert "penstock.shared.config.ServiceSettings" in used(SOURCES["docs/reference.py"])
