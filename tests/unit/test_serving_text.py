"""Tokens become text piece by piece, and the pieces are the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.rollout.conversations.text_stream import MAX_BLOCK, TextStream, ToolCalls, held_back

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


def decode_bytes(token_ids: list[int]) -> str:
    """Decode tokens, each of which is one byte: a character of several bytes is complete only with its last token."""
    return bytes(token_ids).decode("utf-8", "replace")


def streamed(text: str, stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(decode_bytes, stop)
    return [*(stream.push([token]) for token in text.encode()), stream.close()]


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_the_pieces_are_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    text = text.replace("\ufffd", "")
    cuts = [place for each in stop if (place := text.find(each)) >= 0]
    expected = text[: min(cuts)] if cuts else text
    pieces = streamed(text, tuple(stop))
    assert "".join(pieces) == expected
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    assert streamed("abé") == ["a", "b", "", "é", ""]
    assert streamed("a world", ("wonder",)) == ["a", " ", "", "", "wor", "l", "d", ""]
    assert streamed("a wonderful", ("wonder",)) == ["a", " ", *[""] * 10]


@pytest.mark.parametrize(("text", "held"), [("", 0), ("abc", 0), ("ab<", 1), ("ab<tool", 5), ("<tool_call", 10)])
def test_the_beginning_of_a_possible_marker_is_held_back(text: str, held: int) -> None:
    assert held_back(text, ["<tool_call>"]) == held


@pytest.mark.parametrize(
    ("text", "content", "names", "valid"),
    [
        ("just <b>text</b>\n", "just <b>text</b>\n", [], None),
        (f"I look.\n{CALL}\n{CALL}", "I look.", ["f", "f"], True),
        (CALL, "", ["f"], True),
        ("<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", [], False),
        (f"{CALL}<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", ["f"], False),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', [], False),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None, [], False),
    ],
)
def test_tool_calls_are_taken_out_of_the_text(text: str, content: str | None, names: list[str], valid: bool) -> None:
    for size in (1, 7, len(text)):
        parser, output, calls = ToolCalls(), "", []
        for start in range(0, len(text), size):
            more, found = parser.push(text[start : start + size])
            output, calls = output + more, calls + found
        output += parser.close()
        assert (output, [call.name for call in calls], parser.valid) == (
            text if content is None else content,
            names,
            valid,
        )
        assert all(json.loads(call.arguments) == {"x": "é"} for call in calls)


def test_calls_that_never_end_are_text_and_little_is_held_back() -> None:
    parser, output = ToolCalls(), 0
    for _ in range(20):
        content, calls = parser.push("<tool_call>" * 1000)
        assert not calls
        output += len(content)
        assert parser.valid is (None if not output else False)
    assert output >= 20 * 11_000 - MAX_BLOCK - 100
    assert len(parser.close()) == 20 * 11_000 - output


def test_a_call_after_one_that_is_too_long_is_a_call() -> None:
    text = "<tool_call>" + "x" * (MAX_BLOCK + 1) + "</tool_call>" + CALL
    for size in (4096, len(text)):
        parser, output, names = ToolCalls(), "", []
        for start in range(0, len(text), size):
            more, found = parser.push(text[start : start + size])
            output, names = output + more, names + [call.name for call in found]
        assert (output + parser.close(), names, parser.valid) == (text.removesuffix(CALL), ["f"], False)


def test_nesting_beyond_what_can_be_parsed_is_text() -> None:
    text = "<tool_call>" + "[" * 60_000 + "</tool_call>"
    parser = ToolCalls()
    assert parser.push(text) == (text, [])
    assert parser.valid is False
