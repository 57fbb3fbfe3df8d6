"""The demo's summary of a run, and its progress: a panel on a terminal, lines in a pipe."""

from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.demo.command import _print
from penstock.cli.demo.outcome import FIRST, GOAL, LAST, Outcome, scores_of
from penstock.cli.jobs.view import View, panel, progress_line
from penstock.cli.jobs.watching import LINE_S, QUIET_S, _Lines
from penstock.cli.printing import console
from penstock.shared.protocol.jobs import JobRecord, JobStatus

REPORT = {"ok": True, "equation": {"drawn": 4, "trained": 4, "dropped": {}, "in_flight": 0}, "violations": []}
RISING = [0.4] * FIRST + [0.7] * 3 + [0.95] * LAST
MISSED = "the goal was missed: a mean sampled reward of at least 0.9 over the last 10 updates"
SHORT = [0.4] * FIRST + [0.95] * (LAST - 3)


def record(phase: str = "succeeded", **status: Any) -> JobRecord:
    found = JobStatus.model_validate({"phase": phase, "step": 18, "policy_version": 17, **status})
    return JobRecord(id="job_1", name="addition", created_at=datetime.now(UTC), spec={}, status=found)


def outcome(rewards: list[float], *, phase: str = "succeeded", ok: bool = True, goal: float | None = GOAL) -> Outcome:
    report = {**REPORT, "ok": ok, "violations": [] if ok else ["once only: draw 3.0 was trained 2 times"]}
    return Outcome(record(phase, message="why"), rewards, report, 61.04, Path("/data"), goal=goal)


@pytest.mark.parametrize(
    ("run", "code", "flaws"),
    [
        (outcome(RISING), 0, []),
        (outcome(SHORT), 1, [f"{MISSED}; it was 0.785"]),
        (outcome([]), 1, [f"{MISSED}; no update was made"]),
        (outcome(SHORT, goal=None), 0, []),
        (outcome(RISING, ok=False), 1, ["the audit failed: once only: draw 3.0 was trained 2 times"]),
        (outcome(RISING, phase="failed"), 1, ["the job failed: why"]),
        (outcome(RISING, phase="cancelled"), 3, ["the job cancelled: why"]),
    ],
    ids=["learnt", "goal missed", "no update", "another file", "audit", "failed", "cancelled"],
)  # fmt: skip
def test_a_run_succeeds_only_if_every_check_passes(
    run: Outcome, code: int, flaws: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.code == code
    _print(run, Console(), as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is (code == 0)
    assert err.splitlines() == [f"error: {flaw}" for flaw in flaws]


def test_the_summary_names_the_warnings_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    warnings = {"no_signal": "every completion so far earned 0", "truncation": "90% of the completions are [cut]"}
    found = record(warnings=[{"kind": kind, "message": text, "since": since} for kind, text in warnings.items()])
    run = Outcome(found, RISING, REPORT, 61.04, Path("/data"))
    _print(run, console(), as_json=False)
    assert re.findall(r"^  warning         (.*)$", capsys.readouterr().out, re.MULTILINE) == [
        "no_signal: every completion so far earned 0", "truncation: 90% of the completions are [cut]"
    ]  # fmt: skip
    _print(run, console(stderr=True), as_json=True)
    assert json.loads(capsys.readouterr().out)["warnings"] == warnings
    assert run.code == 0, "a warning is no failure"
    _print(outcome(RISING), console(), as_json=False)
    assert "warning" not in capsys.readouterr().out


def test_the_summary_is_one_document_or_lines(capsys: pytest.CaptureFixture[str]) -> None:
    scores = scores_of(
        {"eval/greedy": [None, 0.4, 1.0], "eval/seconds": [0.3, 0.4], "eval/failed": [0.0, 0.0], "loss": [1.0]}
    )
    assert scores == {"eval/greedy": (0.4, 1.0)}
    run = Outcome(record(checkpoint="/c"), RISING, REPORT, 61.04, Path("/data"), evaluations=scores)
    screen = Console(file=io.StringIO(), width=200)
    _print(run, screen, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["reward"] == {"first": pytest.approx(0.4), "last": pytest.approx(0.95), "goal": GOAL, "reached": True}
    assert (found["updates"], found["version"], found["seconds"], found["audit"]) == (18, 17, 61.0, True)
    assert (found["evaluation"], found["equation"]) == (
        {"eval/greedy": {"first": 0.4, "last": 1.0}},
        REPORT["equation"],
    )
    assert screen.file.getvalue() == "", "progress and summary never mix"  # type: ignore[attr-defined]
    _print(run, screen, as_json=False)
    output = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "sampled reward  0.400 -> 0.950   (goal 0.9: reached)" in output
    assert "drawn 4 = trained 4" in output
    for command in ("serve addition --name addition-chat", "chat addition-chat '3+4='", "export addition --to"):
        assert f"penstock {command}" in output
    assert capsys.readouterr().out == ""


QUEUES = {"tickets": 30, "groups": 2, "batches": 1}


def view_at(step: int, **more: Any) -> View:
    status = {
        "step": step,
        "policy_version": step + 40,
        "total_steps": 600,
        "queues": QUEUES,
        "draws": {"in_flight": 64},
    }
    return View(record("running", **status), 6.1, {"reward/mean": [0.25, 0.75], "lag/max": [1.0]}, **more)


def test_a_line_and_the_panel_show_the_progress() -> None:
    view = view_at(3, tokens_per_s=1234.0)
    line = progress_line(view)
    for part in (
        "update 3/600",
        "version 43",
        "reward 0.750",
        "lag 1",
        "1,234 tokens/s",
        "30 tickets, 2 groups, 1 batches",
    ):
        assert part in line, part
    screen = Console(file=io.StringIO(), width=120)
    screen.print(panel(view))
    drawn = screen.file.getvalue()  # type: ignore[attr-defined]
    for part in ("version 43", "lag 1", "1,234 tokens/s", "0.75", "30 tickets   2 groups   1 batches"):
        assert part in drawn, part


def test_a_pipe_gets_a_line_for_an_update_but_not_for_each() -> None:
    screen, clock = Console(file=io.StringIO(), width=200), [100.0]
    lines = _Lines(screen, lambda: clock[0])

    def lines_after(after_s: float, step: int, *, last: bool = False) -> int:
        before = screen.file.getvalue().count("\n")  # type: ignore[attr-defined]
        clock[0] += after_s
        lines.update(view_at(step), last=last)
        return int(screen.file.getvalue().count("\n") - before)  # type: ignore[attr-defined]

    assert lines_after(0.0, 0) == 1, "the first status"
    assert lines_after(LINE_S, 0) == 0, "no update yet"
    assert lines_after(QUIET_S, 0) == 1, "a sign of life without an update"
    assert lines_after(LINE_S / 2, 1) == 0, "too soon"
    assert lines_after(LINE_S / 2, 5) == 1
    assert lines_after(LINE_S, 5) == 0, "each update once"
    assert lines_after(0.0, 6, last=True) == 1
