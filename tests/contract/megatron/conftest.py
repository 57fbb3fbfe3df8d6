"""Measurements of the megatron backend on Gloo ranks, taken once for all tests."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@dataclass(frozen=True)
class Measured:
    """Measurements of each rank, by case and quantity, and the exported model."""

    ranks: list[dict[str, dict[str, float]]]
    export: Path

    def worst(self, case: str, quantity: str) -> float:
        """Return the largest value of a quantity over the ranks, or NaN if one is NaN."""
        return float(np.max([rank[case][quantity] for rank in self.ranks if case in rank]))


@pytest.fixture(scope="session")
def measured(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Run ``measure.py`` on two ranks, then on four; return the measurements."""
    spec = importlib.util.spec_from_file_location("megatron_measure", Path(__file__).with_name("measure.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    directory = tmp_path_factory.mktemp("megatron")
    measure = sys.modules[spec.name].measure_all
    return Measured([*ranks.run(2, measure, directory), *ranks.run(4, measure, directory)], directory / "export")
