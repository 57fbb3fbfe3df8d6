"""Graders in OpenAI's format: formulas, slots, similarity, what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from penstock.services.coordinator.graders import scorer_of
from penstock.services.reward.scorers.similarity import bleu, common_length, fuzzy_match, gleu, rouge_l, rouge_n
from penstock.shared.config.rewards.formula import Formula
from penstock.shared.config.rewards.graders import Grader, InlineGrader, fields_of, parts_of, total_of
from penstock.shared.config.rewards.scorers import GraderScorer
from penstock.shared.config.rewards.slots import check_slots, fill_slots, item_fields
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.grading import GRADER_ERRORS, error_text, split_error

GRADERS: TypeAdapter[Any] = TypeAdapter(Grader)
CHECK = {"type": "string_check", "name": "right", "operation": "eq", "input": "{{sample.output_text}}",
         "reference": "{{ item.answer }}"}  # fmt: skip
PYTHON = {"type": "python", "name": "own"}
JUDGE = {"type": "score_model", "name": "judge", "model": "m", "input": [{"role": "user", "content": "{{item.q}}"}]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5 * a + b", 3.5),
        ("-(a - b) ^ 2", -1.0),
        ("min(a, b, 9) + max(1) + abs(-1)", 4.0),
        ("floor(2.7) + ceil(2.1) + sqrt(4) + log(exp(1))", 8.0),
        (" a / 2 ** 2", 0.75),
    ],
)
def test_formulas(text: str, value: float) -> None:
    assert Formula(text).value({"a": 3.0, "b": 2.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    ["a +", "a; b", "__import__('os')", "a.b", "a[0]", "lambda: 1", "f(a)", "min()", "abs(a, b)", "min(a, key=b)",
     "True", "'a'", "a if b else c", "(" * 300, "-" * 900 + "1", "+".join("a" * 200), "a" * 1001],
)  # fmt: skip
def test_invalid_formulas_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        Formula(text)


@pytest.mark.parametrize("text", ["a / 0", "log(0)", "sqrt(-1)", "exp(1000)", "(0 - 1) ^ 0.5", "9 ^ 9 ^ 9 ^ 9",
                                  "min(1, 1e308 * 10)", "abs((0 - 8) ^ (1 / 3))", "min(1, 1e999)"])  # fmt: skip
def test_a_formula_without_a_finite_value_fails(text: str) -> None:
    with pytest.raises(ValueError, match=r"no value|not a finite number"):
        Formula(text).value({"a": 1.0})


def test_slots() -> None:
    text = "Q {{ item.q }}: {{item.options[1].text}} / {{ sample.output_json.x }} / {{sample.output_text}} {not one}"
    item = {"q": "why", "options": [{}, {"text": ["a", 1]}]}
    sample = {"output_text": '{"x": null}', "output_json": {"x": None}}
    assert fill_slots(check_slots(text), item, sample) == 'Q why: ["a", 1] / null / {"x": null} {not one}'
    assert item_fields(text) == {"q", "options"}
    for missing in ({}, {"q": "why"}, {"q": "why", "options": [1]}):
        with pytest.raises(LookupError, match=r"there is no 'item\."):
            fill_slots(text, missing, sample)


@pytest.mark.parametrize(
    "text", ["{{ item }}", "{{ row.q }}", "{{}}", "{{ item[0] }}", "{{sample.choices}}", "{{ item.q! }}"]
)
def test_bad_slots(text: str) -> None:
    with pytest.raises(ValueError):
        check_slots(text)


def test_similarity() -> None:
    assert common_length("ABCBDAB", "BDCABA") == 4
    assert fuzzy_match("this is a test", "this is a test!") == pytest.approx(28 / 29)
    assert (fuzzy_match("", ""), fuzzy_match("a", "")) == (1.0, 0.0)
    one, other = ["the", "cat", "sat", "on", "the", "mat"], ["the", "cat", "is", "on", "the", "mat"]
    assert rouge_n(one, other, 1) == pytest.approx(5 / 6)
    assert rouge_n(one, other, 2) == pytest.approx(3 / 5)
    assert rouge_l(one, other) == pytest.approx(5 / 6)
    assert gleu(one, other) == pytest.approx((5 + 3 + 1 + 0) / 18)
    assert bleu(one, one) == pytest.approx(1.0)
    assert 0 < bleu(one[:3], one) < bleu(one[:5], one) < 1
    assert bleu(["dog"], one) == 0.0


def test_comparing_two_long_texts_takes_little_memory() -> None:
    words = [str(number) for number in range(20_000)]
    tracemalloc.start()
    assert common_length(words, words[-3:]) == common_length(words[-3:], words) == 3
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with pytest.raises(ValueError, match="at most 32768"):
        fuzzy_match("a" * 32_769, "b" * 32_769)


def test_fields_and_parts_of_a_multi_grader() -> None:
    grader = GRADERS.validate_python(
        {
            "type": "multi",
            "name": "all",
            "graders": {"right": CHECK, "judge": JUDGE},
            "calculate_output": "right * judge",
        }
    )
    assert fields_of(grader) == {"answer", "q"}
    assert list(parts_of(grader)) == ["right", "judge"]
    assert total_of(grader, {"right": 0.5, "judge": 3.0}) == 1.5
    alone = GRADERS.validate_python({"type": "multi", "name": "m", "graders": CHECK, "calculate_output": "right"})
    assert list(parts_of(alone)) == ["right"]


@pytest.mark.parametrize(
    ("grader", "words"),
    [
        ({**CHECK, "operation": "regex"}, "operation"),
        ({**CHECK, "reference": "{{ answer }}"}, "item.FIELD"),
        ({**CHECK, "image_tag": "x"}, "image_tag"),
        ({**JUDGE, "range": [1, 0]}, "range"),
        (PYTHON, "either source .* or path .*: neither is set"),
        ({**PYTHON, "source": "x", "path": f"own@{'0' * 64}:grade"}, "either source .* or path .*: both are set"),
        ({**PYTHON, "path": "./own.py"}, r"found './own.py'; must be ./FILE.py, .*`penstock submit`"),
        ({**PYTHON, "path": "package.module:grade"}, "found 'package.module:grade'; must be ./FILE.py"),
        ({**PYTHON, "path": f"own@{'0' * 64}:score"}, "a file with a function grade"),
        ({"type": "label_model", "name": "x"}, "label_model"),
        ({"type": "multi", "name": "x", "graders": {"a": CHECK}, "calculate_output": "a + b"}, "is named 'b'"),
        ({"type": "multi", "name": "x", "graders": {}, "calculate_output": "1"}, "graders"),
        ({"type": "text_similarity", "name": "x", "input": "", "reference": "", "evaluation_metric": "meteor"}, "bleu"),
    ],
)  # fmt: skip
def test_invalid_graders_are_refused(grader: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GRADERS.validate_python(grader)


def test_a_request_to_the_api_of_openai_names_no_file() -> None:
    file, own = {**PYTHON, "path": f"own@{'0' * 64}:grade"}, TypeAdapter(InlineGrader)
    for grader in (file, {"type": "multi", "name": "m", "graders": {"own": file}, "calculate_output": "own"}):
        GRADERS.validate_python(grader)
        with pytest.raises(ValidationError, match="only the grader of a job file may name a file; set source"):
            own.validate_python(grader)
    assert own.validate_python({**PYTHON, "source": "x"}).source == "x"


def test_models_need_an_address_of_the_deployment() -> None:
    judge = GRADERS.validate_python(JUDGE)
    with pytest.raises(ValidationError, match="base_url"):
        GraderScorer(grader=judge)
    with pytest.raises(ConfigError, match="PENSTOCK_GRADER_URL"):
        scorer_of(judge, ServiceSettings(grader_url=""))
    scorer = scorer_of(judge, ServiceSettings(grader_url="http://models/v1/", grader_key_env="KEY_NAME"))
    assert (scorer.base_url, scorer.api_key_env, scorer.budget_s) == ("http://models/v1", "KEY_NAME", 60.0)
    with pytest.raises(ConfigError, match="PENSTOCK_GRADER_KEY_ENV"):
        scorer_of(judge, ServiceSettings(grader_url="http://models/v1", grader_key_env="sk-secret"))


def test_kinds_of_errors_survive_as_text() -> None:
    for flag in GRADER_ERRORS:
        assert split_error(error_text(flag, "a: b")) == (flag, "a: b")
    assert split_error("some: thing") == ("other_error", "some: thing")
