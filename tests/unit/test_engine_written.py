"""Tokens so far of running completions of an engine's server: only tokens whose weights are certain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.dispatch import Dispatch
from penstock.services.rollout.engines.remote import label_of
from penstock.services.rollout.engines.sglang.calls import Stream
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling, Span

EOS = 2
BEGUN = Sample(token_ids=[5, 6], logprobs=[-0.5, -0.6], finish="abort", spans=[Span(1, 0, 2, "w1")])


def letters(token_ids: list[int]) -> str:
    return "".join(chr(96 + token) for token in token_ids)


class Server:
    """Stands in for an engine's server: the test decides which events it sends, and when the engine reads the end."""

    def __init__(self) -> None:
        self.label = label_of(3, "w3")
        self.streams: list[Stream] = []
        self.is_read = asyncio.Event()
        self.dispatch: Dispatch[Stream] = Dispatch("server", 4, begin=self.begin, decode=self.decode, end=self.end)

    def begin(self, completion: Completion) -> Stream:
        self.streams.append(Stream(completion, letters, rid="r.", label=self.label))
        return self.streams[-1]

    async def decode(self, stream: Stream) -> Finish:
        await self.is_read.wait()
        return "stop"

    async def end(self, streams: Sequence[Stream]) -> None:
        self.is_read.set()

    async def ask(self, *, begun: Sample | None = None, **sampling: Any) -> Stream:
        """Send the request 'a', and return its stream once the engine decodes it."""
        wanted = Sampling(**{"max_new_tokens": 9, **sampling})
        request = GenRequest(request_id="a", prompt_ids=[7], sampling=wanted, begun=begun)
        self.asking = asyncio.create_task(self.dispatch.complete(request, (EOS,), None, None))
        async with asyncio.timeout(30):
            while not self.streams:
                await asyncio.sleep(0)
        return self.streams[-1]

    def send(self, *token_ids: int, finish: str | None = None) -> None:
        """Send an event with more tokens."""
        stream = self.streams[-1]
        rows = [[-token / 10, token, None] for token in token_ids]
        reason = None if finish is None else {"type": finish}
        number = len(stream.token_ids) + len(rows)
        meta = {"completion_tokens": number, "output_token_logprobs": rows, "finish_reason": reason}
        stream.take({"meta_info": meta}, self.label)

    def written(self) -> dict[str, Sample]:
        return self.dispatch.written(["a"])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    found.dispatch.start()
    yield found
    found.is_read.set()
    await found.asking
    await found.dispatch.close()


async def test_tokens_after_new_weights_count_only_once_the_server_names_their_version(server: Server) -> None:
    """A token that was on its way at the update carries the label of the new weights, but the old ones gave it."""
    await server.ask()
    server.send(7, 8)
    assert server.written()["a"].spans == [Span(3, 0, 2, "w3")]
    server.label = label_of(4, "w4")
    server.send(9)
    server.label = label_of(5, "w5")
    server.send(10, 11)
    assert server.written() == {
        "a": Sample(token_ids=[7, 8], logprobs=[-0.7, -0.8], finish="abort", spans=[Span(3, 0, 2, "w3")])
    }


async def test_a_completion_without_tokens_before_an_update_has_no_certain_tokens(server: Server) -> None:
    await server.ask()
    assert server.written() == {}
    server.label = label_of(4, "w4")
    server.send(9)
    assert server.written() == {}


async def test_tokens_that_another_worker_wrote_are_certain(server: Server) -> None:
    await server.ask(begun=BEGUN)
    server.send(7)
    server.label = label_of(4, "w4")
    server.send(9)
    [sample] = server.written().values()
    assert sample.token_ids == [5, 6, 7]
    assert sample.spans == [Span(1, 0, 2, "w1"), Span(3, 2, 3, "w3")]


@pytest.mark.parametrize(
    ("tokens", "finish", "sampling"),
    [
        ((7, EOS), "stop", {}),
        ((7, 8, 9), "length", {"max_new_tokens": 3}),
        ((7, 8), "abort", {}),
        ((7, 8, 9), None, {"stop_strings": ("hi",)}),
    ],
)
async def test_an_ended_completion_is_not_in_progress(
    server: Server, tokens: tuple[int, ...], finish: str | None, sampling: dict[str, Any]
) -> None:
    """The last token has arrived, but the engine has not yet read how the completion ended."""
    stream = await server.ask(**sampling)
    server.send(tokens[0])
    assert list(server.written()) == ["a"]
    server.send(*tokens[1:], finish=finish)
    assert stream.token_ids == list(tokens)
    assert server.dispatch.running == 1
    assert server.written() == {}
