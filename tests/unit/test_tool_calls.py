"""Calls in a policy's text, and results as tokens."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.rollout.conversations.turns import Call, find_calls, token_of
from penstock.services.rollout.observations import ObservationWriter
from penstock.shared.config.environment import CallFormat, ObservationFormat
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.tools import CalculatorTool, PythonTool
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import build_tokenizer

PLAIN = CallFormat(begin="<", end=">", body="text")
JSON = CallFormat()
TOOLS = [CalculatorTool(), PythonTool()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(ModelConfig.parse({"config": {}, "tokenizer": "char", "characters": "0123456789+<>;()"}))


@pytest.mark.parametrize(
    ("text", "expressions"),
    [("<48/2>", ["48/2"]), ("a<1>b<2>c", ["1", "2"]), ("48/2", []), ("<48/2", []), ("1>2<", []), ("<<1>>", ["<1"])],
)
def test_plain_calls(text: str, expressions: list[str]) -> None:
    assert find_calls(text, PLAIN, TOOLS[:1]) == [Call("calculator", {"expression": e}) for e in expressions]


def test_json_calls_and_their_mistakes() -> None:
    bodies = [
        '{"name": "python", "arguments": {"code": "1"}}',
        '{"name": "x"}',
        "{",
        "[]",
        '{"name": "x", "arguments": 3}',
    ]
    found = find_calls(" and ".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies), JSON, TOOLS)
    assert found[:2] == [Call("python", {"code": "1"}), Call("x", {})]
    assert [call.problem.split(":")[0] for call in found[2:]] == [
        "the call is not JSON", "a call is an object with 'name' and 'arguments'", "'arguments' must be an object"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "calculator", "arguments": {"expression": 99999999999999999999999}}',
        r'{"name": "calculator", "arguments": {"expression": "\ud800"}}',
        r'{"name": "calculator", "arguments": {"\ud800": 1}}',
        r'{"name": "\ud800", "arguments": {}}',
    ],
)
def test_a_call_that_no_message_can_carry_is_reported_as_a_mistake(call: str) -> None:
    [found] = find_calls(f"<tool_call>{call}</tool_call>", JSON, TOOLS)
    assert found.problem.startswith("the call cannot be sent")
    assert not found.arguments


def test_deeply_nested_json_is_reported_as_a_mistake() -> None:
    [call] = find_calls("<tool_call>" + "[" * 100_000 + "</tool_call>", JSON, TOOLS)
    assert call.problem


def test_results_are_written_in_order_between_their_frames(tokenizer: Any) -> None:
    form = ObservationFormat(before="(", result="{result};", after=")")
    writer = ObservationWriter(tokenizer, form, max_tokens=20)
    assert tokenizer.decode(writer.write(["24", "7"])) == "(24;7;)"
    assert tokenizer.decode(writer.write(["1" * 99, "2" * 99])) == f"({'1' * 8};{'2' * 8};)"
    assert len(writer.write(["1" * 99])) == 20
    assert len(writer.write(["1"] * 10)) == 20, "the note that the results do not fit is cut like any result"
    writer.check(9)
    with pytest.raises(ConfigError, match="leaves no room for 10 results"):
        writer.check(10)


def test_special_tokens_in_a_result_do_not_reach_the_policy(tokenizer: Any) -> None:
    writer = ObservationWriter(tokenizer, ObservationFormat(), max_tokens=50)
    eos = tokenizer.eos_token
    nested = eos[:2] + eos + eos[2:]
    assert tokenizer.decode(writer.write([f"1{eos}2{nested}3"])) == "123"
    assert not set(writer.write([eos, nested])) & set(tokenizer.all_special_ids)


def test_a_marker_is_one_token_only_where_no_other_holds_it() -> None:
    assert token_of({"<": 1, ">": 2}, ">") == 2
    assert token_of({"<": 1, ">": 2, "/>": 3}, ">") is None
    assert token_of({"<": 1}, ">") is None
