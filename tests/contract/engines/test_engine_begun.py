"""Every engine continues a completion that another engine began, as if it had not been interrupted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import GenRequest, Sample, Span, Token

LETTERS = "0123456789+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$"
"""Text of the tokens from 4 on."""
PROMPT = (20, 30, 40)
"""A prompt whose greedy completion does not repeat one token."""


def exact(bench: Any) -> bool:
    """Return True if random numbers depend on the index in the whole completion; a server counts from its prompt."""
    return bench.engine.caps.staging != "reference"


async def interrupted(bench: Any, request: GenRequest, num_tokens: int) -> Sample:
    """Abort a request after at least ``num_tokens`` tokens; return its completion."""
    task = asyncio.create_task(bench.engine.generate(replace(request, request_id="interrupted")))
    await bench.until_tokens(num_tokens)
    await bench.engine.abort(["interrupted"])
    [sample] = (await task).samples
    assert sample.finish == "abort"
    assert num_tokens <= len(sample.token_ids) < bench.length
    return sample


async def completed(bench: Any, request: GenRequest, begun: Sample | None = None) -> Sample:
    [sample] = (await bench.engine.generate(replace(request, begun=begun))).samples
    return sample


def cut(sample: Sample, num_tokens: int) -> Sample:
    """Return the first tokens of a completion of one version, as if it had been aborted."""
    [span] = sample.spans
    return Sample(
        token_ids=sample.token_ids[:num_tokens], logprobs=sample.logprobs[:num_tokens], finish="abort",
        spans=[Span(span.version, 0, num_tokens, span.weights)],
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_a_completion_continues_as_if_it_had_not_been_interrupted(bench: Any, temperature: float) -> None:
    request = bench.ask("one", prompt=PROMPT, temperature=temperature)
    whole = await completed(bench, request)
    begun = await interrupted(bench, request, 60)
    received: list[Token] = []
    result = await bench.engine.generate(replace(request, begun=begun), received.append)
    [sample] = result.samples
    num = len(begun.token_ids)
    assert (sample.token_ids[:num], sample.logprobs[:num]) == (begun.token_ids, begun.logprobs)
    assert (sample.finish, len(sample.token_ids), len(sample.spans)) == ("length", bench.length, 1)
    assert [token.token_id for token in received] == sample.token_ids[num:-1], "listeners have the rest already"
    assert bench.error(sample, prompt=PROMPT, temperature=temperature) < 1e-4
    if exact(bench) or temperature == 0:
        assert sample.token_ids == whole.token_ids


async def test_spans_name_the_versions_before_and_after(bench: Any) -> None:
    request = bench.ask("two")
    begun = await interrupted(bench, request, 40)
    first = begun.spans[0].weights
    await bench.update(1, seed=1)
    task = asyncio.create_task(completed(bench, request, begun))
    await bench.until_tokens(40)
    await bench.update(2, seed=2)
    sample = await task
    num, ends = len(begun.token_ids), [span.end for span in sample.spans]
    assert [(span.version, span.start) for span in sample.spans] == [(0, 0), (1, num), (2, ends[1])]
    assert (ends[0], ends[2], sample.spans[0].weights) == (num, bench.length, first)
    assert num + 40 <= ends[1] < bench.length
    assert bench.error(sample, seeds=(0, 1, 2)) < 1e-4


async def test_what_is_written_so_far_is_the_beginning(bench: Any) -> None:
    request = bench.ask("three")
    task = asyncio.create_task(completed(bench, request))
    await bench.until_tokens(30)
    found = await bench.engine.written(["three", "unknown"])
    assert list(found) == ["three"]
    sample, whole = found["three"], await task
    num = len(sample.token_ids)
    assert 30 <= num < bench.length
    assert (sample.token_ids, sample.logprobs) == (whole.token_ids[:num], whole.logprobs[:num])
    assert (sample.finish, sample.spans) == ("abort", [replace(whole.spans[0], end=num)])
    assert await bench.engine.written(["three"]) == {}


async def test_what_waits_for_a_row_keeps_its_beginning(bench: Any) -> None:
    request = bench.ask("four")
    begun = cut(await completed(bench, request), 20)
    running = asyncio.create_task(bench.engine.generate(bench.ask("all", n=bench.max_running)))
    await bench.until_tokens(bench.max_running)
    task = asyncio.create_task(completed(bench, request, begun))
    await bench.until_tokens(bench.max_running)
    assert await bench.engine.written(["four"]) == {}, "it is not being decoded"
    await bench.engine.abort(["four"])
    assert await task == begun
    await bench.engine.abort(["all"])
    await running


async def test_a_stop_string_may_begin_before_the_interruption(bench: Any) -> None:
    free = await completed(bench, bench.ask("free", prompt=PROMPT, temperature=0.0, max_new_tokens=60))
    text = "".join(LETTERS[token - 4] if token >= 4 else "\0" for token in free.token_ids)
    start = next(i for i in range(4, 57) if "\0" not in text[i : i + 3] and text.index(text[i : i + 3]) == i)
    request = bench.ask(
        "stop", prompt=PROMPT, temperature=0.0, max_new_tokens=60, stop_strings=(text[start : start + 3],)
    )
    for num in (start + 1, start + 2):
        sample = await completed(bench, request, cut(free, num))
        assert (sample.finish, sample.token_ids) == ("stop", free.token_ids[: start + 3])


async def test_limits_count_the_beginning(bench: Any) -> None:
    free = await completed(bench, bench.ask("free", max_new_tokens=60))
    every = tuple(range(4, 54, 2))
    request = bench.ask("min", max_new_tokens=60, min_new_tokens=40, stop_token_ids=every)
    sample = await completed(bench, request, cut(free, 30))
    assert 40 <= len(sample.token_ids) <= 60
    assert not set(sample.token_ids[30:39]).intersection(every)
    last = await completed(bench, bench.ask("last", max_new_tokens=60), cut(free, 59))
    assert (len(last.token_ids), last.finish) == (60, "length")


async def test_penalties_count_the_beginning_or_are_refused(bench: Any) -> None:
    request = bench.ask("penalty", frequency_penalty=1.5, presence_penalty=0.5, max_new_tokens=80)
    if exact(bench):
        whole = await completed(bench, request)
        sample = await completed(bench, request, cut(whole, 40))
        assert sample.token_ids == whole.token_ids
        return
    begun = cut(await completed(bench, bench.ask("free", max_new_tokens=80)), 40)
    with pytest.raises(ConfigError, match="penalties"):
        await completed(bench, request, begun)


async def test_what_cannot_be_a_beginning_is_refused(bench: Any) -> None:
    free = await completed(bench, bench.ask("free", max_new_tokens=20))
    request, begun = bench.ask("wrong", max_new_tokens=20), cut(free, 10)
    for wrong, reason in [
        (replace(request, n=2, begun=begun), "one completion"),
        (replace(request, begun=free), "some must be left"),
        (replace(request, begun=replace(begun, logprobs=[])), "log-probs"),
        (replace(request, begun=replace(begun, spans=[])), "log-probs"),
        (replace(request, begun=replace(begun, token_ids=[], logprobs=[], spans=[])), "0 begun tokens"),
        (replace(request, begun=replace(begun, token_ids=[54, *begun.token_ids[1:]])), "token ids"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            await bench.engine.generate(wrong)
