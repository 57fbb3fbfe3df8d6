"""The chaos driver: its schedule, its clocks, its checks, and three minutes of faults by its command line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.protocol.events import BatchTrained, Dropped, LineageForked
from penstock.shared.protocol.ids import Draw

ROOT = Path(__file__).resolve().parents[2]
SEED, MINUTES = 7, 3


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tests.chaos.schedule")


def test_a_schedule_depends_on_its_seed_and_has_every_kind_before_one_repeats(schedules: Any) -> None:
    kinds = list(schedules.KINDS)
    first, again, other = (schedules.schedule(seed, 5, kinds) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.kind for fault in first[: len(kinds)]} == set(kinds)
    assert sum(fault.after_s + fault.seconds for fault in first) >= 300
    assert {fault.kind for fault in schedules.schedule(1, 2, ["kill", "link"])} == {"kill", "link"}
    for wrong in (["kil"], []):
        with pytest.raises(ValueError, match="kinds of faults"):
            schedules.schedule(1, 1, wrong)


def test_a_changed_clock_is_wrong_as_its_file_says_and_sleeps_stay_right(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("3600")
    program = (
        "import time\n"
        "from pathlib import Path\n"
        "began, wrong = time.monotonic(), time.time()\n"
        f"Path({str(clock)!r}).write_text('0')\n"
        "time.sleep(0.6)\n"
        "print(round((wrong - time.time()) / 60), time.monotonic() - began < 60)\n"
    )
    environment = {**os.environ, "CHAOS_CLOCK": str(clock), "PYTHONPATH": str(Path(__file__).with_name("clock"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["60", "True"]


def test_feedback_is_lost_unless_stored_deleted_or_known_with_a_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    records = importlib.import_module("tests.chaos.books").FeedbackRecords(
        stream={"stands"}, deletion={"erased"}, ledger={"admitted", "id gone"},
        ids={"decided": 9, "admitted": 9, "below": 4, "open": 5}, decided_below=5,
        decision={"decided": "rejected", "unknown id": "trained", "admitted": "matched"},
    )  # fmt: skip
    acked = {"stands", "erased", "decided", "admitted", "below", "open", "unknown id", "id gone", "nowhere"}
    assert records.lost(acked) == {"open", "unknown id", "id gone", "nowhere"}
    assert records.count({"decided", "stands"}) == {"stream": 1, "ids": 1, "deletion": 0, "decision": 1, "ledger": 0}
    assert records.undecided({"erased", "decided", "unknown id", "admitted", "stands"}) == {"admitted", "stands"}


def test_a_fork_is_a_failure_unless_a_deletion_and_a_damaged_checkpoint_explain_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    unexplained = importlib.import_module("tests.chaos.books").unexplained_forks
    base: dict[str, Any] = {"writer_epoch": 1, "time": 1.0}
    open_: dict[str, Any] = {"min_version": 0, "deadline": 0.0}
    erased, lost = (
        LineageForked(**base, **open_, from_batch=1, version=2, digest="w", reason=reason, trainer_epoch=1)
        for reason in ("erased: draw 3.0", "inputs of batch 1 are gone: draw 3.0")
    )
    dropped = Dropped(**base, **open_, draws=[Draw(3, 1)], lengths=[0], reason="erased", redraw=False)
    trained = BatchTrained(**base, number=2, revision=1, version=3, digest="w", trainer_epoch=1)
    assert unexplained([erased, dropped, trained], damaged=True) == []
    assert unexplained([erased, dropped, trained], damaged=False) == [erased], "a deletion alone forks nothing"
    assert unexplained([erased, trained, dropped], damaged=True) == [erased], "the ledger does not show the deletion"
    assert unexplained([lost, dropped, trained], damaged=True) == [lost]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_four_jobs_survive_three_minutes_of_faults() -> None:
    """The same seed repeats a failure by `python -m tests.chaos`; the output names the kinds that were skipped."""
    command = [sys.executable, "-m", "tests.chaos", "--seed", str(SEED), "--minutes", str(MINUTES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1150, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
