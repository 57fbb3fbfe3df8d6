"""Groups of the embedded engine that share the keys and values of their prompt: same tokens, less memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded import attention, batch, parts, prefixes
from penstock.services.rollout.engines.embedded.batch import Batch
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.models import build_model
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling

PROMPT = [(3 * i) % 50 + 4 for i in range(30)]
OTHER = [(7 * i) % 50 + 4 for i in range(21)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short prompts be shared."""
    monkeypatch.setattr(prefixes, "SHARED_FROM", 2)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the number of tokens of each forward pass."""
    seen: list[int] = []
    decode = batch.decode

    def spy(plan: Any, token_ids_T: torch.Tensor, *rest: Any) -> Any:
        seen.append(len(token_ids_T))
        return decode(plan, token_ids_T, *rest)

    monkeypatch.setattr(batch, "decode", spy)
    return seen


def group(bench: Any, name: str, prompt: Sequence[int], num: int, **sampling: Any) -> list[GenRequest]:
    """Return one request for each completion of a group, of different lengths."""
    return [
        bench.ask(f"{name}.{i}", prompt=prompt, seed=i, temperature=0.9, **{"max_new_tokens": 8 + 9 * i, **sampling})
        for i in range(num)
    ]


async def answers(bench: Any, requests: Sequence[GenRequest]) -> list[Sample]:
    return [answer.samples[0] for answer in await asyncio.gather(*map(bench.engine.generate, requests))]


def check(bench: Any, requests: Sequence[GenRequest], samples: Sequence[Sample], seeds: Sequence[int] = (0,)) -> None:
    for request, sample in zip(requests, samples, strict=True):
        error = bench.error(sample, prompt=request.prompt_ids, temperature=0.9, seeds=seeds)
        assert error < 1e-4


async def test_shared_prompts_give_the_tokens_of_separate_ones(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More completions than rows: the last ones of a group join while others run, beside prompts that none shares."""
    asked = [*group(bench, "a", PROMPT, 9), *group(bench, "b", OTHER, 7), *group(bench, "c", PROMPT[:13], 1)]
    together = await answers(bench, asked)
    check(bench, asked, together)
    monkeypatch.setattr(prefixes, "SHARED_FROM", 1000)
    apart = await answers(bench, asked)
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in apart]


async def test_a_completion_that_joins_later_computes_one_token(bench: Any, passes: list[int]) -> None:
    asked = group(bench, "a", PROMPT, 3, max_new_tokens=60)
    first = asyncio.gather(*map(bench.engine.generate, asked[:2]))
    await bench.until_tokens(20)
    last = await answers(bench, asked[2:])
    check(bench, asked, [*(answer.samples[0] for answer in await first), *last])
    assert passes[0] == len(PROMPT), "the prefix, and its last token once for both rows"
    assert max(passes[1:]) <= 3


@pytest.mark.parametrize("mode", ["swap", "in_place"])
async def test_an_update_leaves_nothing_of_a_shared_prompt(bench: Any, passes: list[int], mode: str) -> None:
    asked = group(bench, "a", PROMPT, 4, max_new_tokens=200)
    asking = asyncio.create_task(answers(bench, asked))
    await bench.until_tokens(100)
    del passes[:]
    await bench.update(1, seed=1, mode=mode)
    samples = await asking
    assert all([span.version for span in sample.spans] == [0, 1] for sample in samples)
    check(bench, asked, samples, seeds=(0, 1))
    written = sum(sample.spans[0].end for sample in samples)
    assert max(passes) == len(PROMPT) - 1 + 4 + written, "the prefix once, and what each row has written"


async def test_a_shared_prompt_that_outlives_its_weights_is_seen(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes.Prefixes, "drop", lambda prefixes: None)
    asked = group(bench, "a", PROMPT, 2, max_new_tokens=200)
    asking = asyncio.create_task(answers(bench, asked))
    await bench.until_tokens(60)
    await bench.update(1, seed=1)
    errors = [
        bench.error(sample, prompt=PROMPT, temperature=0.9, seeds=(0, 1)) for sample in await asking
    ]  # fmt: skip
    assert max(errors) > 0.1


@pytest.mark.parametrize("room", [4, 7])
async def test_a_shared_prompt_is_divided(
    bench: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(parts, "PASS_TOKENS", room)
    asked = [*group(bench, "a", PROMPT, 3, max_new_tokens=60), *group(bench, "b", OTHER, 2, max_new_tokens=30)]
    asking = asyncio.create_task(answers(bench, asked))
    await bench.until_tokens(60)
    await bench.update(1, seed=1)
    check(bench, asked, await asking, seeds=(0, 1))
    assert max(passes) <= room + 5


async def test_begun_completions_share_the_prompt_before_them(bench: Any, passes: list[int]) -> None:
    asked = group(bench, "a", PROMPT, 4, max_new_tokens=60)
    whole = await answers(bench, asked)
    begun = [
        Sample(
            token_ids=sample.token_ids[: 10 + i], logprobs=sample.logprobs[: 10 + i], finish="abort",
            spans=[replace(sample.spans[0], end=10 + i)],
        )
        for i, sample in enumerate(whole)
    ]  # fmt: skip
    await bench.engine.generate(bench.ask("next", max_new_tokens=1))  # the prompt, which no row has, is freed
    del passes[:]
    rest = await answers(bench, [replace(one, begun=start) for one, start in zip(asked, begun, strict=True)])
    assert [sample.token_ids for sample in rest] == [sample.token_ids for sample in whole]
    check(bench, asked, rest)
    assert passes[0] == len(PROMPT) - 1 + sum(1 + 10 + i for i in range(4))


async def test_a_group_that_is_cut_off_frees_its_prompt(bench: Any) -> None:
    asked = group(bench, "a", PROMPT, 4, max_new_tokens=200)
    asking = asyncio.create_task(answers(bench, asked))
    await bench.until_tokens(40)
    shared = bench.engine._batch._cache.prefixes
    assert shared.num_bytes == 2 * 2 * (len(PROMPT) - 1) * 16 * 4, "two layers, keys and values, float32 heads of 16"
    await bench.engine.pause("keep")
    await bench.engine.abort([request.request_id for request in asked[:3]])
    await bench.engine.resume()
    samples = await asking
    check(bench, asked, samples)
    assert [sample.finish for sample in samples] == ["abort"] * 3 + ["length"]
    await bench.engine.generate(bench.ask("next", max_new_tokens=2))
    assert shared.num_bytes == 0


def cache_bytes(num_tokens: int, num_new: int, rows: int) -> int:
    """Return the bytes of the cache while a group runs, of a model with 1 M parameters."""
    config = ModelConfig(
        config=ArchitectureConfig(hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2),
        tokenizer="char",
    )
    model = build_model(config, 64, seed=0)
    decoding = Batch(model, max_running=rows, max_length=1024, detokenize=str, version=0)
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
    prompt = [4 + i % 50 for i in range(num_tokens)]
    decoding.admit([Completion(i, 0, prompt, sampling, (), i) for i in range(rows)])
    decoding.run(2, lambda: False)
    assert decoding.count == rows
    return decoding.cache_bytes


def test_a_group_keeps_the_keys_and_values_of_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    position = 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, width, bytes of a number
    assert cache_bytes(512, 64, 16) == (511 + 16 * 64) * position
    monkeypatch.setattr(prefixes, "SHARED_FROM", 1000)
    assert cache_bytes(512, 64, 16) == 16 * (512 + 64) * position


def test_matrix_products_give_what_the_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used on other devices than a CPU, for all queries at once or in parts."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=numbers) for shape in ((2, 3, 5, 8), (2, 3, 11, 8), (2, 3, 11, 8)))
    mask = torch.zeros((2, 1, 5, 11)).masked_fill_(torch.rand((2, 1, 5, 11), generator=numbers) < 0.3, -torch.inf)
    for some in (1 << 26, 140):
        monkeypatch.setattr(attention, "MAX_SCORES", some)
        for own in (None, mask):
            expected, found = attention.attention_lse(q, k, v, own), attention.plain_attention_lse(q, k, v, own)
            assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(expected, found, strict=True))


def test_matrix_products_have_float32_scores_of_bfloat16_queries() -> None:
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 64, generator=numbers).bfloat16() * 3 for size in (5, 11, 11))
    _, lse = attention.plain_attention_lse(q, k, v)
    torch.testing.assert_close(lse, attention.plain_attention_lse(q.float(), k.float(), v.float())[1])
