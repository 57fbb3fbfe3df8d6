"""The code scorer: programs against tests, honest and not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.services.reward.scorers.code import Code
from penstock.shared.config.scorers import CodeScorer
from penstock.shared.errors import ScoringError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containment is made of Linux features")


def settings(**changes: Any) -> CodeScorer:
    return CodeScorer.parse({"time_limit_s": 20.0, **changes})


ADD = "def add(a, b):\n    return a + b"
TESTS: list[Any] = ["assert add(1, 2) == 3", {"call": "add", "args": [2, 2], "returns": 4}, "assert add(0, 0) == 0"]


@pytest.fixture(scope="module")
def scorers() -> Iterator[tuple[Code, Code]]:
    """All or nothing, and by fraction."""
    with closing(Code(settings())) as whole, closing(Code(settings(partial=True))) as partial:
        yield whole, partial


@pytest.fixture
def hasty() -> Iterator[Code]:
    """By fraction, with little time."""
    with closing(Code(settings(time_limit_s=1.0, partial=True))) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("program", "tests", "all_pass", "fraction"),
    [
        (ADD, TESTS, 1.0, 1.0),
        (ADD.replace("a + b", "a + b if a < 2 else 5"), TESTS, 0.0, 2 / 3),
        ("def add(a, b", TESTS, 0.0, 0.0),
        ("", TESTS, 0.0, 0.0),
        ("\0", TESTS, 0.0, 0.0),
        (ADD + "\nprint(open(3))", TESTS, 0.0, 0.0),
        ("class S:\n    def f(self, x): return [x]", [{"call": "S().f", "args": [1], "returns": [1]}], 1.0, 1.0),
        ("f = lambda: 0.1 + 0.2", [{"call": "f", "args": [], "returns": 0.3}], 1.0, 1.0),
        ("f = lambda: float('nan')", [{"call": "f", "args": [], "returns": None}], 0.0, 0.0),
        ("f = lambda: {1, 2}", [{"call": "f", "args": [], "returns": [1, 2]}], 0.0, 0.0),
        ("print(int(input()) ** 2, '')", [{"stdin": "3", "stdout": "9"}, {"stdin": "4", "stdout": "16\n\n"}], 1.0, 1.0),
        ("print(9)", [{"stdin": "3", "stdout": "9"}, {"stdin": "4", "stdout": "16"}], 0.0, 0.5),
        ("print(9)\nraise SystemExit(1)", [{"stdin": "3", "stdout": "9"}], 0.0, 0.0),
    ],
)  # fmt: skip
def test_scores(scorers: tuple[Code, Code], program: str, tests: list[Any], all_pass: float, fraction: float) -> None:
    for scorer, expected in zip(scorers, (all_pass, fraction), strict=True):
        text = f"Here:\n```python\n{program}\n```\n"
        assert scorer.score("", text, None, {"tests": tests}) == pytest.approx(expected)


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        'import os\nos.write(3, b\'{"step": 0, "nonce": "", "value": null}\\n\' * 9)\nos._exit(0)',
        "import builtins\nbuiltins.exec = builtins.eval = builtins.compile = lambda *a, **k: None",
        "import json\njson.dumps = lambda *a, **k: '{}'",
        "import os\nos.write(4, b'')",
        "print('passed')",
    ],
)
def test_cheap_cheats_score_nothing(scorers: tuple[Code, Code], cheat: str) -> None:
    assert scorers[1].score("", cheat, None, {"tests": ["assert False", "assert missing()"]}) == 0.0


def test_time_is_for_all_tests_together(hasty: Code) -> None:
    tests: list[Any] = ["assert True", *({"stdin": str(n), "stdout": str(n)} for n in range(50))]
    started = time.monotonic()
    assert hasty.score("", "import time\ntime.sleep(0.3)\nprint(input())", None, {"tests": tests[1:]}) < 0.1
    assert hasty.score("", "while True: pass", None, {"tests": tests}) == 0.0
    assert time.monotonic() - started < 30.0, "each test took the time of all"


def test_row_without_tests_is_an_error(scorers: tuple[Code, Code]) -> None:
    for row in ({}, {"tests": []}, {"tests": [7]}, {"tests": None}):
        with pytest.raises(ScoringError, match="the row"):
            scorers[0].score("", "print(1)", None, row)


def test_installed_packages_are_there_on_request(scorers: tuple[Code, Code]) -> None:
    tests = {"tests": [{"call": "f", "args": [], "returns": 3}]}
    program = "def f():\n    import numpy\n    return int(numpy.arange(3).sum())"
    assert scorers[0].score("", program, None, tests) == 0.0
    with closing(Code(settings(site_packages=True))) as scorer:
        assert scorer.score("", program, None, tests) == 1.0
    ready = "import sys\ndef f():\n    return 3 if 'numpy' in sys.modules else 0"
    with closing(Code(settings(site_packages=True, preload=["numpy"]))) as scorer:
        assert scorer.score("", ready, None, tests) == scorer.score("", program, None, tests) == 1.0
    with pytest.raises(ScoringError, match="No module named 'numpy'"):
        Code(settings(preload=["numpy"]))
