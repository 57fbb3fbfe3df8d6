"""Every scorer keeps the same contract: a finite number for any text, the same each time. New ones join ``CASES``."""

from __future__ import annotations

import math
import sys
from typing import Any, SupportsFloat

import pytest
from pydantic import TypeAdapter

from penstock.services.reward.scorers import Scorer, open_scorer
from penstock.shared.config.reward import ScorerConfig
from penstock.shared.errors import ScoringError

ADAPTER: TypeAdapter[ScorerConfig] = TypeAdapter(ScorerConfig)


def length(prompt: str, completion: str, answer: str | None, row: dict[str, Any], *, scale: float = 1.0) -> float:
    """The user function of these tests."""
    return scale * len(completion)


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "exact": ({"type": "exact"}, " 12 ", "13"),
    "exact-case": ({"type": "exact", "ignore_case": True}, "12", "x"),
    "math": ({"type": "math"}, "The answer is $\\frac{24}{2}$", "The answer is 13"),
    "format": (
        {"type": "format", "pattern": r".*<answer>\d+</answer>"},
        "so\n<answer>12</answer>",
        "<answer>12</answer>.",
    ),
    "function": ({"type": "function", "path": "scorers_under_test:length", "args": {"scale": 0.5}}, "12", ""),
}
"""Configuration, a completion that scores 1 for the answer "12", one that scores 0."""


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Scorer, str, str]:
    monkeypatch.setitem(sys.modules, "scorers_under_test", sys.modules[__name__])
    spec, right, wrong = CASES[request.param]
    return open_scorer(ADAPTER.validate_python(spec)), right, wrong


def score(scorer: Scorer, completion: str, answer: str | None = "12") -> float:
    value = scorer.score("6+6=", completion, answer, {"prompt": "6+6="})
    assert isinstance(value, SupportsFloat)
    return float(value)


def test_right_is_one_and_wrong_is_zero_each_time(case: tuple[Scorer, str, str]) -> None:
    scorer, right, wrong = case
    for _ in range(2):
        assert score(scorer, right) == 1.0
        assert score(scorer, wrong) == 0.0


@pytest.mark.parametrize(
    "text", ["", " ", "\x00", "🦆" * 50, "\\frac{1", "$$", "1/0", "####", "\n" * 100, "{}{", "a" * 20_000]
)
def test_any_text_gets_a_finite_number(case: tuple[Scorer, str, str], text: str) -> None:
    assert math.isfinite(score(case[0], text))


@pytest.mark.parametrize("name", ["exact", "math"])
def test_a_missing_answer_is_an_error_not_a_zero(name: str) -> None:
    with pytest.raises(ScoringError, match="needs a reference answer"):
        score(open_scorer(ADAPTER.validate_python(CASES[name][0])), "12", None)


def test_case_matters_unless_told() -> None:
    assert score(open_scorer(ADAPTER.validate_python({"type": "exact"})), "ABC", "abc") == 0.0
    assert score(open_scorer(ADAPTER.validate_python({"type": "exact", "ignore_case": True})), "ABC", "abc") == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("#### 18", "9 * 2 = <<9*2=18>>18\n#### 18", 1.0),
        ("It is 1,800.", "1800", 1.0),
        ("0.5", "\\frac{1}{2}", 1.0),
        ("72 clips, not 71", "72", 0.0),
        ("\\boxed{-3}", "-3", 1.0),
    ],
)
def test_math_equality(completion: str, answer: str, expected: float) -> None:
    assert score(open_scorer(ADAPTER.validate_python({"type": "math"})), completion, answer) == expected
