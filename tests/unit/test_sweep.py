"""The combinations of a sweep, and its plot."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.exits import USAGE
from penstock.cli.jobs.sweep import Point, points_of, svg_plot
from penstock.shared.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "addition.yaml"


def test_every_combination_is_a_point() -> None:
    assert points_of(["a.b=1,2", "c=x, y"]) == [
        ("a.b=1", "c=x"), ("a.b=1", "c=y"), ("a.b=2", "c=x"), ("a.b=2", "c=y"),
    ]  # fmt: skip
    assert points_of([]) == [()]
    for text in ("a", "=1", "a=", "a=1,,2"):
        with pytest.raises(ConfigError, match=r"must look like optimizer\.learning_rate=1e-4,3e-4"):
            points_of([text])


def test_a_plot_that_cannot_be_written_is_refused_before_the_first_job(tmp_path: Path) -> None:
    words = ["sweep", str(EXAMPLE), "--plot", str(tmp_path / "none" / "plot.svg")]
    result = CliRunner().invoke(app, words, env={"PENSTOCK_URL": "http://127.0.0.1:1"})
    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert f"the folder {tmp_path / 'none'} does not exist" in result.stderr


def test_the_plot_has_a_line_for_each_job_and_a_name_for_each_point() -> None:
    slow = Point(("lr=<1",), curves=[[(1, 0.0), (2, 0.5)], [(1, 0.1), (2, 0.3)]])
    fast = Point(("lr=2",), curves=[[(1, 0.0), (2, 1.0)], []])
    tree = ElementTree.fromstring(svg_plot([slow, fast], "reward/mean"))
    lines = tree.findall(".//{*}polyline")
    assert [line.get("points", "").split()[-1] for line in lines] == ["632.0,164.0", "632.0,226.4", "632.0,8.0"]
    assert [text.text for text in tree.findall(".//{*}text")][-2:] == ["lr=<1", "lr=2"]
    assert slow.ends == [0.25, 0.2]
    assert ElementTree.fromstring(svg_plot([Point(())], "m")).findall(".//{*}polyline") == []
