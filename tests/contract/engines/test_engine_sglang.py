"""The contract of rollout engines over HTTP, with a stand-in for SGLang's server, and with SGLang.

On a CPU, SGLang runs with fake kernels (``sglang_cpu``): ``make sglang-test``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.shared.config.service import load_settings

LIMIT_S = 1800
STANDIN = Path(__file__).parent / "standin"
FILES = ("reference_updates.py", "sglang_updates.py", "server_requests.py")
SLOTS = tuple(
    f"reference_updates.py::{name}"
    for name in (
        "test_a_cache_that_is_not_dropped_would_be_seen", "test_a_staged_version_is_held_until_its_update_ends",
        "test_memory_that_was_overwritten_before_the_commit_is_refused",
        "test_a_process_that_dies_with_a_version_open_frees_it_and_the_engine_says_so",
        "test_a_process_that_dies_in_an_update_serves_no_version_of_it",
    )
)  # fmt: skip
"""Tests of engines that keep a slot open; SGLang's server reads a file of the worker: see ``sglang_updates.py``."""
NAMES = ("reference_updates.py::test_a_load_that_fails_makes_the_engine_dirty_until_a_full_update",)
"""A test with an unknown name, which SGLang ignores. A load that fails ends its server: see ``sglang_updates.py``."""
OWN = (
    "sglang_updates.py::test_a_server_that_runs_already_gets_the_model_and_works_for_one_job",
    "sglang_updates.py::test_a_worker_that_is_killed_in_a_pause_leaves_a_server_that_goes_on",
    "sglang_updates.py::test_a_server_whose_worker_was_killed_goes_on_once_another_joins",
    "sglang_updates.py::test_a_stop_that_only_the_server_knows_is_a_cut",
)
"""Tests that start a second server, for which a GPU may have no room."""


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_contract_holds_over_http(run_contract: Callable[..., None]) -> None:
    environment = {"PENSTOCK_SGLANG_PYTHON": sys.executable, "PYTHONPATH": str(STANDIN), "OMP_NUM_THREADS": "1"}
    run_contract("sglang", Path(sys.executable), FILES, environment, without=(*SLOTS, *NAMES), limit_s=LIMIT_S)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_sglang_itself_keeps_the_contract(
    run_contract: Callable[..., None], python_with: Callable[[str], Path]
) -> None:
    environment = {"PENSTOCK_SGLANG_PYTHON": str(python_with("sglang"))}
    run_contract("sglang", Path(sys.executable), FILES, environment, without=(*SLOTS, *NAMES, *OWN), limit_s=LIMIT_S)


@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_sglang_with_fake_kernels_keeps_the_contract(run_contract: Callable[..., None]) -> None:
    """The server, scheduler, radix cache and weight updater are SGLang's; kernels are plain torch (``sglang_cpu``)."""
    python = load_settings().engines_dir.expanduser() / "sglang-cpu" / "bin" / "python"
    if not python.is_file():
        assert "sglang-cpu" not in os.environ.get("PENSTOCK_REQUIRE_ENGINES", "").split(), f"no {python}"
        pytest.skip(f"no {python}: run `make sglang-test`")
    environment = {
        "PENSTOCK_SGLANG_PYTHON": str(python), "PENSTOCK_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent / "sglang_cpu" / "kernels"),
    }  # fmt: skip
    run_contract("sglang", Path(sys.executable), FILES, environment, without=(*SLOTS, *NAMES), limit_s=LIMIT_S)
