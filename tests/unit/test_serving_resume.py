"""A completion that another worker continues reads like one of a single worker: characters, stop strings, calls."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.services.coordinator.api.live.completion_format import ChatFormat
from penstock.services.coordinator.serving.answer import Answer
from penstock.services.coordinator.serving.models import Served
from penstock.services.rollout.serving.choice import Choice
from penstock.services.rollout.serving.outbox import messages_of
from penstock.services.rollout.serving.server import MAX_SILENT, Presence
from penstock.shared.protocol.codec import MAX_INLINE_BYTES, unpack
from penstock.shared.protocol.generation import Sampling, Token
from penstock.shared.protocol.live.inference import (
    Chunk,
    Chunks,
    ClientSampling,
    InferenceReply,
    InferenceRequest,
    ToolCall,
)

CALL = '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
EOS = 0
ID = "0192f0c1-0000-7000-8000-000000000001"


def decode(token_ids: list[int]) -> str:
    """Decode tokens, each of which is one byte."""
    return bytes(token_ids).decode("utf-8", "replace")


def request_of() -> InferenceRequest:
    return InferenceRequest(
        ids=[ID], gateway="g", kind="chat", tools=[{"type": "function"}], sampling=ClientSampling(seed=1), episode="e",
        key_id="k", body_digest="d", started=0.0,
    )  # fmt: skip


def choice_of(request: InferenceRequest, stop: tuple[str, ...] = ()) -> Choice:
    sampling = Sampling(max_new_tokens=500, stop_strings=stop, seed=1)
    return Choice(request, 0, [1], sampling, frozenset({EOS}), decode, decode)


def answer_of(request: InferenceRequest) -> Answer:
    served = Served(name="m", job="j", online=True, version=0, created=0, hold_s=1.0)
    answer = Answer(served, request)
    answer.accepted(InferenceReply(worker="w", accepted=True, version=0, prompt_ids=[[1]]))
    return answer


def content_of(chunks: list[Chunk]) -> tuple[str, list[ToolCall]]:
    return "".join(chunk.text for chunk in chunks), [call for chunk in chunks for call in chunk.calls]


def written(choice: Choice, tokens: bytes) -> list[Chunk]:
    """Return the chunks of tokens that an engine reports one by one, until the choice has ended."""
    chunks = []
    for token in tokens:
        if not choice.ended:
            chunks.append(choice.push(Token(0, token, -0.1, 3)))
    return chunks


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="aé <\n", max_size=12), st.text(alphabet="bé€ ", max_size=12), st.data())
@example("aé", "€", None)
def test_text_and_calls_are_those_of_one_worker(before: str, after: str, data: st.DataObject | None) -> None:
    tokens = f"{before}{CALL}{after}".encode()
    whole = choice_of(request_of())
    chunks = written(whole, tokens)
    finish = whole.finished("stop")
    expected = content_of([*chunks, whole.last(finish, recorded=True)])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1), max_size=3))) if data else [2]
    request, answer = request_of(), answer_of(request_of())
    received: list[Chunk] = []
    choice, begin = choice_of(request), 0
    for cut in [*cuts, len(tokens)]:
        received += written(choice, tokens[begin:cut])
        assert all(answer.feed(chunk) for chunk in received[-(cut - begin) :])
        if cut < len(tokens):
            choice, begin = choice_of(request), cut
            choice.resume(answer.progress()[0])
    end = choice.finished("stop")
    received.append(choice.last(end, recorded=True))
    assert content_of(received) == expected
    assert end == finish == "tool_calls"
    record = choice.interaction(job="j", finish=finish, untrainable="", template="")
    assert (record.text, record.calls) == (whole.text, whole.calls) == expected
    assert record.token_ids == list(tokens)
    assert json.loads(record.calls[0].arguments) == {"x": "é"}


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_string_may_lie_across_the_two_parts(cut: int) -> None:
    """The second engine sees only the rest of the stop string, and would not stop by itself."""
    tokens = b"say: STOP and more"
    request, answer = request_of(), answer_of(request_of())
    first, second = (choice_of(request, ("STOP",)) for _ in range(2))
    received = written(first, tokens[:cut])
    assert all(answer.feed(chunk) for chunk in received)
    assert not first.ended
    second.resume(answer.progress()[0])
    received += written(second, tokens[cut:])
    assert second.ended
    received.append(second.last(second.finished("stop"), recorded=True))
    assert content_of(received) == ("say: ", [])
    assert bytes(second.token_ids) == b"say: STOP", "nothing after it is recorded"


def test_the_minimum_length_counts_over_both_parts() -> None:
    request, answer = request_of(), answer_of(request_of())
    first = choice_of(request, ("b",))
    for chunk in written(first, b"a"):
        answer.feed(chunk)
    sampling = Sampling(max_new_tokens=500, min_new_tokens=4, stop_strings=("b",), seed=1)
    second = Choice(request, 0, [1], sampling, frozenset({EOS}), decode, decode)
    second.resume(answer.progress()[0])
    written(second, b"bbbbbb")
    assert bytes(second.token_ids) == b"abbb"


def test_calls_are_taken_from_the_record_if_the_last_chunk_is_lost() -> None:
    request, answer = request_of(), answer_of(request_of())
    choice = choice_of(request)
    chunks = written(choice, f"{CALL}\n{CALL}".encode())
    for chunk in chunks[: len(CALL.encode()) + 5]:  # then nothing more arrives
        assert answer.feed(chunk)
    finish = choice.finished("stop")
    answer.finish_from(0, choice.interaction(job="j", finish=finish, untrainable="", template=""))
    received = answer._chunks
    assert answer.done
    assert content_of(received) == (choice.text, choice.calls)
    assert len({call.id for call in content_of(received)[1]}) == 2
    assert received[-1].finish == "tool_calls"


def test_a_gateway_counts_as_gone_after_several_checks_without_a_sign() -> None:
    presence = Presence()
    for _ in range(MAX_SILENT):
        assert presence.look(["a", "b"]) == set()
    presence.seen("a")
    presence.seen("nobody")
    assert presence.look(["a", "b"]) == {"b"}
    assert presence.look([]) == set()
    assert presence.look(["b"]) == set(), "the next request of the gateway starts the count again"


def test_the_ids_of_calls_are_the_same_at_every_worker_and_differ_between_choices() -> None:
    ids = []
    for request in (request_of(), request_of(), replace(request_of(), ids=["another"])):
        choice = choice_of(request)
        written(choice, CALL.encode())
        ids.append(choice.calls[0].id)
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.long
def test_a_whole_answer_with_likeliest_tokens_is_sent_in_pieces_that_read_as_one() -> None:
    request = replace(request_of(), logprobs=20, stream=False)
    ids = list(range(9000))
    top = [[(f"token {token + k}", -float(k)) for k in range(20)] for token in ids]
    whole = Chunk(
        ID, 0, 0, ids, [-0.5] * len(ids), 3, "the text", [ToolCall("c", "f", "{}")],
        [f"token {token}" for token in ids], top, "stop", True,
    )  # fmt: skip
    messages = messages_of(Chunks("w", [whole], in_hand=[ID]))
    assert len(messages) > 2
    assert max(map(len, messages)) <= MAX_INLINE_BYTES
    answer, one = answer_of(request), answer_of(request)
    read = [unpack(message, Chunks)[0] for message in messages]
    for chunk in (chunk for message in read for chunk in message.chunks):
        assert not answer.done
        assert answer.feed(chunk)
    assert [message.in_hand for message in read] == [None] * (len(read) - 1) + [[ID]]
    assert one.feed(whole)
    pieces, entire = asyncio.run(answer.read(0)), asyncio.run(one.read(0))
    kinds = (ChatFormat(answer, True, False), ChatFormat(one, True, False))
    assert kinds[0].whole(pieces) == kinds[1].whole(entire)
