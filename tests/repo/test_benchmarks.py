"""Benchmarks keep their figures, whatever happens to their pictures."""

from __future__ import annotations

import ast
from pathlib import Path

BENCHMARKS = sorted((Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))


def lines_of(tree: ast.AST, name: str) -> list[int]:
    """Return the lines of a function's calls."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
    ]


def test_figures_are_written_before_pictures_are_drawn() -> None:
    """A missing matplotlib must not cost the hours of a benchmark."""
    drawing = 0
    for path in BENCHMARKS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        drawn = lines_of(tree, "draw")
        if drawn:
            drawing += 1
            assert max(lines_of(tree, "finish")) < min(drawn), path.name
    assert drawing > 5
