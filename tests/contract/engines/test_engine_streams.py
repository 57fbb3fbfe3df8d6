"""Every engine streams tokens as they are sampled, with the likeliest alternatives, and scores texts meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.services.rollout.held_weights import HeldWeights
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.protocol.generation import GenResult, Token

CLOSE = 1e-4


async def test_tokens_arrive_one_by_one_and_the_last_one_with_the_result(bench: Any) -> None:
    received: list[list[Token]] = [[], []]

    def listen(request: int, token: Token) -> None:
        received[request].append(token)

    async def ask(request: int) -> GenResult:
        asked = bench.ask(f"s{request}", n=2, max_new_tokens=20 + 9 * request, seed=request)
        return await bench.engine.generate(asked, lambda token: listen(request, token))

    silent = asyncio.create_task(bench.engine.generate(bench.ask("silent", max_new_tokens=40)))
    results = await asyncio.gather(ask(0), ask(1))
    await silent
    for tokens, result in zip(received, results, strict=True):
        for index, sample in enumerate(result.samples):
            mine = [token for token in tokens if token.index == index]
            assert [token.token_id for token in mine] == sample.token_ids[:-1]
            assert [token.logprob for token in mine] == sample.logprobs[:-1]
            assert {token.version for token in mine} == {0}


async def test_streamed_tokens_carry_the_version_that_sampled_them(bench: Any) -> None:
    received: list[Token] = []
    task = asyncio.create_task(bench.engine.generate(bench.ask("swapped"), received.append))
    await bench.until_tokens(30)
    await bench.update(1, seed=1)
    sample = (await task).samples[0]
    labels = [span.version for span in sample.spans for _ in range(span.start, span.end)]
    assert [token.version for token in received] == labels[:-1]
    assert set(labels) == {0, 1}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_the_likeliest_tokens_stand_beside_the_sampled_one(bench: Any, temperature: float) -> None:
    asked = replace(bench.ask("top", max_new_tokens=12, temperature=temperature), top_logprobs=3)
    plain = bench.engine.generate(bench.ask("plain", max_new_tokens=30))
    received: list[Token] = []
    result, other = await asyncio.gather(bench.engine.generate(asked, received.append), plain)
    sample = result.samples[0]
    assert [len(top) for top in sample.top] == [3] * 12
    assert [token.top for token in received] == sample.top[:-1]
    assert other.samples[0].top == []
    logits_TV = bench.plain([*bench.prompt, *sample.token_ids])[len(bench.prompt) - 1 : -1]
    expected = torch.log_softmax(logits_TV / temperature, -1).topk(3, -1)
    assert [[token for token, _ in top] for top in sample.top] == expected.indices.tolist()
    values = torch.tensor([[logprob for _, logprob in top] for top in sample.top])
    assert float((values - expected.values).abs().max()) < CLOSE


async def test_a_text_is_scored_while_others_decode(bench: Any) -> None:
    text = [5, 14, 9, 18, 33, 7, 21]
    running = asyncio.create_task(bench.engine.generate(bench.ask("running", max_new_tokens=60)))
    await bench.until_tokens(5)
    scores = await bench.engine.score(text, top_logprobs=2)
    expected_TV = bench.plain(text)
    targets = torch.tensor(text[1:])
    expected = expected_TV[:-1].gather(-1, targets[:, None])[:, 0]
    assert scores.version == 0
    assert float((torch.tensor(scores.logprobs) - expected).abs().max()) < CLOSE
    assert [[token for token, _ in top] for top in scores.top] == expected_TV[:-1].topk(2, -1).indices.tolist()
    assert bench.error((await running).samples[0]) < CLOSE
    assert (await bench.engine.score([5])).logprobs == []


async def test_a_text_is_scored_with_weights_that_are_served_no_more(bench: Any) -> None:
    text = [5, 14, 9, 18, 33, 7, 21]
    before = await bench.engine.score(text)
    await bench.update(1, seed=1)
    running = asyncio.create_task(bench.engine.generate(bench.ask("running", max_new_tokens=60)))
    await bench.until_tokens(5)
    held = await bench.engine.score(text, held=HeldWeights(0, bench.weights(0)))
    newest = await bench.engine.score(text)
    assert (held.version, held.logprobs) == (0, before.logprobs)
    assert newest.version == 1
    assert newest.logprobs != before.logprobs
    sample = (await running).samples[0]
    assert {span.version for span in sample.spans} == {1}
    assert bench.error(sample, seeds=(0, 1)) < CLOSE, "what is decoded meanwhile has the weights that are served"
    for wrong in ({"no.such": torch.zeros(1)}, {name: tensor.double() for name, tensor in bench.weights(0).items()}):
        with pytest.raises(WeightsError):
            await bench.engine.score(text, held=HeldWeights(0, wrong))
    assert (await bench.engine.score(text)).logprobs == newest.logprobs


async def test_a_text_that_cannot_be_scored_is_refused(bench: Any) -> None:
    for text in ([], [5, 10_000], [5] * 5000):
        with pytest.raises(ConfigError, match="a text to score"):
            await bench.engine.score(text)
    await bench.engine.close()
    with pytest.raises(Unavailable):
        await bench.engine.score([5, 6])


async def test_penalties_and_biases_steer_what_is_drawn_and_not_its_log_prob(bench: Any) -> None:
    async def ask(id: str, **sampling: Any) -> Any:
        return (await bench.engine.generate(bench.ask(id, max_new_tokens=40, **sampling))).samples[0]

    once, forced, plain = await asyncio.gather(
        ask("once", presence_penalty=1000.0),
        ask("forced", logit_bias=((11, 200.0),), temperature=0.5),
        ask("plain", frequency_penalty=0.0),
    )
    assert len(set(once.token_ids)) == 40
    assert set(forced.token_ids) == {11}
    assert len(set(plain.token_ids)) < 40
    assert bench.error(once) < CLOSE
    assert bench.error(forced, temperature=0.5) < CLOSE
    with pytest.raises(ConfigError, match="token ids"):
        await ask("strange", logit_bias=((10_000, 1.0),))
