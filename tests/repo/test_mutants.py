"""The list of mutants fits the sources: each changes one existing place, and the tests that should fail exist."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FEWEST = 60


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("penstock_mutants", ROOT / "tests" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_mutant_changes_one_place_of_a_program_that_still_parses(mutants: ModuleType) -> None:
    listed = mutants.read_mutants()
    assert len(listed) >= FEWEST
    assert len({(mutant.file, mutant.find, mutant.replace) for mutant in listed}) == len(listed)
    for mutant in listed:
        source = (ROOT / mutant.file).read_text()
        count = source.count(mutant.find)
        assert count == 1, f"{mutant}: {mutant.find!r} stands there {count} times; change tests/mutants.yaml with it"
        ast.parse(source.replace(mutant.find, mutant.replace))


def test_the_tests_of_every_mutant_exist(mutants: ModuleType) -> None:
    for mutant in mutants.read_mutants():
        for test in mutant.tests:
            assert (ROOT / test.partition("::")[0]).is_file(), f"{mutant}: {test}"
