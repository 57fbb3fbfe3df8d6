"""Size and names: what keeps the tree readable is checked, not hoped for."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("shared", "services", "src/penstock")
    for path in (ROOT / folder).rglob("*.py")
    if "src/penstock/s" not in str(path)
)
MAX_FILE_LINES, MAX_MEDIAN_LINES, MAX_FUNCTION_LINES = 400, 200, 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "v2"}


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_holds_one_concept(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{lines} lines; split it by concept"
    assert path.stem not in EMPTY_NAMES and path.parent.name not in EMPTY_NAMES, "the name says nothing"


def test_the_median_file_is_short() -> None:
    sizes = [n for n in (path.read_text(encoding="utf-8").count("\n") for path in SOURCES) if n > 5]
    assert statistics.median(sizes) <= MAX_MEDIAN_LINES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_can_be_read_at_once(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [(f.name, (f.end_lineno or 0) - f.lineno + 1) for f in functions]
    assert [f"{name}: {lines} lines" for name, lines in long if lines > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_declared_and_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module says in its first line what it is"
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []
    if public and path.stem not in {"__main__", "cli"}:
        names = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
        assert "__all__" in names, "a module with public names has an __all__"


def test_no_swallowed_errors() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            )
            raises = isinstance(node.body[-1], ast.Raise)
            silent = isinstance(node.body[0], ast.Pass)
            if broad and not raises and (silent or "runtime" not in path.parts):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
