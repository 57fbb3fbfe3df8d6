"""Draw docstrings at random, for a reader who has not seen the code: does a sentence need a second reading?

    python tests/docstrings.py [--seed 0] [--number 100]

Prints place, name and first paragraph of each, drawn from all modules, classes and functions of the product. The same
seed draws the same docstrings from the same code.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield ``file:line name`` and the first paragraph of each docstring, sorted by file."""
    folders = (ROOT / "shared", ROOT / "services", ROOT / "src" / "penstock")
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    yield f"{place} {getattr(node, 'name', 'module')}", text.split("\n\n")[0]


def main() -> None:
    """Print the draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=100)
    args = parser.parse_args()
    found = list(docstrings())
    print(f"{args.number} of {len(found)} docstrings, seed {args.seed}")
    for place, text in random.Random(args.seed).sample(found, args.number):
        print(f"\n{place}\n    " + text.replace("\n", "\n    "))


if __name__ == "__main__":
    main()
