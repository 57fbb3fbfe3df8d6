"""The page of guarantees names existing tests or commands for each guarantee."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from penstock.cli import app

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \|([^|]+)\|([^|]*)\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
COMMAND = re.compile(r"`penstock ([a-z -]+)`")


def test_every_guarantee_is_shown_by_tests_that_exist() -> None:
    rows = ROW.findall((ROOT / "docs/guarantees.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    for number, _, shown in rows:
        tests, commands = TEST.findall(shown), COMMAND.findall(shown)
        assert tests or commands, f"guarantee {number} is shown by nothing"
        for command in commands:
            assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command
        for file, name in tests:
            path = ROOT / file
            assert path.is_file(), file
            assert re.search(rf"^(async )?(def|class) {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE), name
