"""Charts in the terminal, ages of jobs, and the JSON and error output of commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.exits import FAILED, Commands
from penstock.cli.jobs.views import chart, held_out_line
from penstock.cli.printing import seconds_of
from penstock.shared.errors import ConfigError

FULL, TOP, BOTTOM = "⣿", "⠉", "⣀"


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = chart("reward", [10, 11, 12, 13], [0.0, 1.0, 2.0, 3.0], width=2, height=1)
    assert lines == ["reward: 3", "3 ┤⣠⠞", "  └1013"]


def test_a_flat_line_and_no_line() -> None:
    assert chart("x", [0, 1, 2], [5.0, None, 5.0], width=4, height=1)[1] == "5 ┤⠄⠀⠀⠠"
    assert chart("x", [0, 1], [None, None]) == ["x: nothing yet"]
    assert chart("x", [7], [1.0], width=3, height=1)[0] == "x: 1"


def test_many_values_fill_the_span_of_their_column() -> None:
    values = [float(i % 2) for i in range(1000)]
    (_, top, bottom, axis) = chart("x", list(range(1000)), values, width=3, height=2)
    assert (top, bottom) == ("1 ┤" + FULL * 3, "0 ┤" + FULL * 3)
    assert axis == "  └0999"


def test_the_newest_held_out_results_in_one_line() -> None:
    series = {"eval/length": [9.0, None, 7.5, None], "eval/success": [0.25, None, 0.0, None]}
    line = "held-out episodes at update 4: eval/length 7.5, eval/success 0"
    assert held_out_line({"steps": [0, 3, 4, 5], "series": series}) == line
    assert held_out_line({"steps": [3], "series": {"eval/success": [None]}}) == ""
    assert held_out_line({"steps": [], "series": {}}) == ""


@pytest.mark.parametrize(("age", "seconds"), [("90m", 5400.0), ("7d", 604800.0), (None, None)])
def test_ages(age: str | None, seconds: float | None) -> None:
    assert seconds_of(age) == seconds


def test_an_invalid_age_is_refused() -> None:
    with pytest.raises(ConfigError, match="90m"):
        seconds_of("soon")


def test_a_path_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = typer.Typer(cls=Commands)

    @group.command()
    def write() -> None:
        (tmp_path / "none" / "model").mkdir()

    @group.callback()
    def several() -> None:
        pass

    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)
    result = CliRunner().invoke(group, ["write"])
    assert (result.exit_code, result.stdout) == (FAILED, "")
    assert result.stderr == f"error: cannot use {tmp_path / 'none' / 'model'}: No such file or directory\n"
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert isinstance(CliRunner().invoke(group, ["write"]).exception, FileNotFoundError)


DOCUMENTS = "show"
"""Commands whose name ends so print JSON without an option."""


def test_every_command_can_print_json() -> None:
    without = []
    stack = [("", typer.main.get_command(app))]
    while stack:
        name, command = stack.pop()
        children = getattr(command, "commands", None)
        if children is not None:
            stack += [(f"{name} {child}".strip(), found) for child, found in children.items()]
        elif not any("--json" in option.opts for option in command.params):
            without.append(name)
    assert [name for name in without if not name.endswith(DOCUMENTS)] == []
