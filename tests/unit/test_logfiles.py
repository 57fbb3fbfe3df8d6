"""Log files by service and job, with a cursor that loses no line and cuts none."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from penstock.services.coordinator.queries.logfiles import read_logs
from penstock.shared.errors import NotFound

OURS, THEIRS = "job_" + "0" * 32, "job_" + "1" * 32


def texts(found: dict[str, object]) -> list[str]:
    lines = found["lines"]
    assert isinstance(lines, list)
    return [line["text"] for line in lines]


def test_the_last_lines_of_each_log(tmp_path: Path) -> None:
    (tmp_path / "trainer-0.log").write_text("a\nb\nc\n")
    (tmp_path / "rollout-1.log").write_text(f"x\n{THEIRS}\n{OURS} and {THEIRS}\n")
    found = read_logs(tmp_path, job=OURS, service=None, tail=2, after=None)
    assert texts(found) == ["x", f"{OURS} and {THEIRS}", "b", "c"]
    assert found["lines"][0] == {"service": "rollout", "worker": "rollout-1", "text": "x"}
    for service in ("rollout", "rollout-1"):
        assert texts(read_logs(tmp_path, job=THEIRS, service=service, tail=1, after=None)) == [f"{OURS} and {THEIRS}"]


def test_lines_that_name_no_job_are_for_admins(tmp_path: Path) -> None:
    """Such lines may be about any job, so a tenant's key cannot read them."""
    (tmp_path / "trainer-0.log").write_text(f"about nobody\n{THEIRS}\n{OURS}\n")
    read = partial(read_logs, tmp_path, job=OURS, service=None, tail=10, after=None)
    assert texts(read(unnamed=False)) == [OURS]
    assert texts(read(unnamed=True)) == ["about nobody", OURS]


def test_following_a_log_returns_new_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("a\nhal")
    found = read_logs(tmp_path, job=OURS, service=None, tail=10, after=None)
    assert texts(found) == ["a"]
    with log.open("a") as file:
        file.write("f\nb\n")
    found = read_logs(tmp_path, job=OURS, service=None, tail=10, after=found["next"])
    assert texts(found) == ["half", "b"]
    (tmp_path / "env-0.log").write_text("late\n")
    found = read_logs(tmp_path, job=OURS, service=None, tail=10, after=found["next"])
    assert texts(found) == ["late"]
    log.write_text("new\n")
    assert texts(read_logs(tmp_path, job=OURS, service=None, tail=10, after=found["next"])) == ["new"]


def test_the_tail_limit_does_not_apply_after_a_cursor(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("a\nb\n")
    found = read_logs(tmp_path, job=OURS, service=None, tail=1, after=None)
    assert texts(found) == ["b"]
    with log.open("a") as file:
        file.write("c\nd\ne\n")
    assert texts(read_logs(tmp_path, job=OURS, service=None, tail=1, after=found["next"])) == ["c", "d", "e"]


@pytest.mark.parametrize("service", ["nobody", "../../etc/passwd", ""])
def test_an_unknown_log_is_refused(tmp_path: Path, service: str) -> None:
    (tmp_path / "trainer-0.log").write_text("a\n")
    with pytest.raises(NotFound, match="trainer-0"):
        read_logs(tmp_path, job=OURS, service=service, tail=10, after=None)
