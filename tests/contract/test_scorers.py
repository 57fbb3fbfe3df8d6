"""Contract of every scorer: it gives any text a finite number, the same each time. Add new scorers to ``CASES``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, SupportsFloat

import pytest
from pydantic import TypeAdapter

from penstock.services.reward.scorers import Closable, GroupScorer, Scorer, open_scorer
from penstock.shared.config.rewards.scorers import ScorerConfig
from penstock.shared.errors import ScoringError

ADAPTER: TypeAdapter[ScorerConfig] = TypeAdapter(ScorerConfig)


def length(prompt: str, completion: str, answer: str | None, row: dict[str, Any], *, scale: float = 1.0) -> float:
    """Score a completion by its length; tests use this as a user's function."""
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
    "code": ({"type": "code"}, "So:\n```python\nprint(6 + 6)\n```", "print(13)"),
    "reward_model": ({"type": "reward_model", "path": "CLASSIFIER", "max_tokens": 2048}, "12", "11"),
    "judge": (
        {"type": "judge", "base_url": "WEB/v1", "model": "m", "template": "{prompt}{completion}|{answer}"},
        "12",
        "13",
    ),
    "http": ({"type": "http", "url": "WEB/score"}, "12", "13"),
}
"""For each scorer: its configuration, a completion that scores 1 for the answer "12", and one that scores 0."""
ROW = {"prompt": "6+6=", "tests": [{"stdin": "", "stdout": "12"}, {"stdin": "x", "stdout": "12\n"}]}


def grade(asked: Any) -> dict[str, Any]:
    """Reply as the judge and the web service of these tests: 12 is right."""
    if asked.path == "/score":
        return {"results": [{"score": float(text == "12")} for text in asked.json["completions"]]}
    assert asked.path == "/v1/chat/completions"
    right = asked.json["messages"][-1]["content"] == "6+6=12|12"
    return {"choices": [{"message": {"content": f"Score: {10 if right else 0}"}, "finish_reason": "stop"}]}


@pytest.fixture(params=list(CASES))
def case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, web: Any
) -> Iterator[tuple[Scorer | GroupScorer, str, str]]:
    monkeypatch.setitem(sys.modules, "scorers_under_test", sys.modules[__name__])
    web.answer = lambda asked: web.reply(grade(asked))
    spec, right, wrong = CASES[request.param]
    found = {k: v.replace("WEB", web.url) if isinstance(v, str) else v for k, v in spec.items()}
    if found.get("path") == "CLASSIFIER":
        found["path"] = str(request.getfixturevalue("classifier"))
    scorer = open_scorer(ADAPTER.validate_python(found))
    yield scorer, right, wrong
    if isinstance(scorer, Closable):
        scorer.close()


def score(scorer: Scorer | GroupScorer, completion: str, answer: str | None = "12") -> float:
    if isinstance(scorer, GroupScorer):
        (value,) = scorer.score_group("6+6=", [completion], answer, ROW)
        if isinstance(value, ScoringError):
            raise value
        return value
    number = scorer.score("6+6=", completion, answer, ROW)
    assert isinstance(number, SupportsFloat)
    return float(number)


def test_right_is_one_and_wrong_is_zero_each_time(case: tuple[Scorer | GroupScorer, str, str]) -> None:
    scorer, right, wrong = case
    for _ in range(2):
        assert score(scorer, right) == pytest.approx(1.0, abs=1e-6)
        assert score(scorer, wrong) == 0.0


def test_a_group_scores_as_its_completions_do_alone(case: tuple[Scorer | GroupScorer, str, str]) -> None:
    scorer, right, wrong = case
    if isinstance(scorer, GroupScorer):
        together = scorer.score_group("6+6=", [right, wrong, "", right], "12", ROW)
        alone = [score(scorer, text) for text in (right, wrong, "", right)]
        assert list(together) == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize(
    "text", ["", " ", "\x00", "🦆" * 50, "\\frac{1", "$$", "1/0", "####", "\n" * 100, "{}{", "a" * 20_000]
)
def test_any_text_gets_a_finite_number_or_an_error_that_says_why(
    case: tuple[Scorer | GroupScorer, str, str], text: str
) -> None:
    try:
        assert math.isfinite(score(case[0], text))
    except ScoringError as error:
        assert "more than max_tokens 2048" in str(error) and len(text) > 2048, "only a reward model has a longest text"


@pytest.mark.parametrize("name", ["exact", "math"])
def test_a_missing_answer_is_an_error_not_a_zero(name: str) -> None:
    with pytest.raises(ScoringError, match="needs a reference answer"):
        score(open_scorer(ADAPTER.validate_python(CASES[name][0])), "12", None)


def test_case_matters_by_default() -> None:
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
