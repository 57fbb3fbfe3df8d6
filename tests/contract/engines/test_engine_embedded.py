"""Internals of the embedded engine: caches, rows and divided prompts that other engines do not show."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock.services.rollout.engines import EmbeddedEngine
from penstock.services.rollout.engines.embedded import batch, parts
from penstock.services.rollout.engines.embedded.batch import Batch
from penstock.services.rollout.engines.embedded.rows import Rows
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import ConfigError, Unavailable
from penstock.shared.models import build_model


async def crossing_error(bench: Any) -> float:
    """Return the deviation of the log-probs of a sample that a weight update crosses."""
    task = asyncio.create_task(bench.engine.generate(bench.ask("crossing")))
    await bench.until_tokens(60)
    await bench.update(1, seed=1)
    sample = (await task).samples[0]
    assert [span.version for span in sample.spans] == [0, 1]
    return float(bench.error(sample, seeds=(0, 1)))


async def test_a_cache_that_outlives_its_weights_is_seen(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "drop_cache", lambda batch: None)
    assert await crossing_error(bench) > 0.1


async def test_a_cache_that_is_dropped_is_exact(bench: Any) -> None:
    assert await crossing_error(bench) < 1e-4


async def test_a_swap_serves_from_the_staged_memory(bench: Any) -> None:
    weights = bench.weights(1)
    await bench.engine.begin_update(version=1, digest="d1", mode="swap")
    await bench.engine.load_chunk(weights)
    await bench.engine.commit_update()
    before = (await bench.engine.generate(bench.ask("before", max_new_tokens=20))).samples[0]
    with torch.no_grad():
        for tensor in weights.values():
            tensor.mul_(0.5)
    after = (await bench.engine.generate(bench.ask("after", max_new_tokens=20))).samples[0]
    assert after.logprobs != before.logprobs


async def test_weights_that_are_not_finite_do_not_outlive_the_next_update(bench: Any) -> None:
    nan = {name: torch.full_like(tensor, math.nan) for name, tensor in bench.weights(1).items()}
    await bench.engine.begin_update(version=1, digest="d1", mode="swap")
    await bench.engine.load_chunk(nan)
    await bench.engine.commit_update()
    broken = await bench.engine.generate(bench.ask("broken", n=bench.max_running, max_new_tokens=40))
    assert all(math.isnan(value) for sample in broken.samples for value in sample.logprobs)
    await bench.update(2, seed=2)
    requests = (bench.ask(str(i), prompt=bench.prompt[: i + 1], max_new_tokens=40 - i) for i in range(4))
    results = await asyncio.gather(*map(bench.engine.generate, requests))
    for i, result in enumerate(results):
        assert bench.error(result.samples[0], prompt=bench.prompt[: i + 1], seeds=(0, 1, 2)) < 1e-4


async def test_rows_that_are_not_finite_leave_nothing_when_they_are_cut_off(bench: Any) -> None:
    nan = {name: torch.full_like(tensor, math.nan) for name, tensor in bench.weights(1).items()}
    await bench.engine.begin_update(version=1, digest="d1", mode="swap")
    await bench.engine.load_chunk(nan)
    await bench.engine.commit_update()
    asked = (bench.ask(str(i), max_new_tokens=200) for i in range(bench.max_running))
    broken = [asyncio.create_task(bench.engine.generate(request)) for request in asked]
    await bench.until_tokens(100 * bench.max_running)
    await bench.engine.abort([str(i) for i in range(1, bench.max_running)])
    await bench.update(2, seed=2)
    results = await asyncio.gather(*(bench.engine.generate(bench.ask(f"w{i}", max_new_tokens=20)) for i in range(4)))
    assert all(bench.error(result.samples[0], seeds=(0, 1, 2)) < 1e-4 for result in results)
    await asyncio.gather(*broken)


async def test_a_step_that_fails_is_reported_to_all_requests(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("victim")))
    await bench.until_tokens(10)

    def fail(batch: Batch, max_steps: int, interrupted: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Batch, "run", fail)
    with pytest.raises(Unavailable, match="out of memory"):
        await task
    with pytest.raises(Unavailable, match="out of memory"):
        await bench.engine.generate(bench.ask("late"))
    with pytest.raises(Unavailable, match="out of memory"):
        await bench.engine.health()


async def test_a_bf16_model_that_is_loaded_beside_it_changes_nothing(bench: Any) -> None:
    """While transformers loads such a model, it changes the default dtype of the whole process."""
    asked = {"temperature": 0.7, "top_p": 0.9, "logit_bias": ((5, 0.3),), "max_new_tokens": 40}
    alone = (await bench.engine.generate(bench.ask("alone", **asked))).samples[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        beside = (await bench.engine.generate(bench.ask("beside", **asked))).samples[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs)


async def test_an_idle_engine_burns_nothing_and_the_loop_stays_free(bench: Any) -> None:
    await bench.engine.generate(bench.ask("warm", max_new_tokens=20))
    before = time.process_time()
    await asyncio.sleep(0.2)
    assert time.process_time() - before < 0.05
    task = asyncio.create_task(bench.engine.generate(bench.ask("busy", n=bench.max_running)))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 10


def test_an_architecture_that_is_not_decoded_is_named() -> None:
    model = build_model(ModelConfig(config=ArchitectureConfig(arch="qwen2"), tokenizer="char"), 54, seed=0)
    model.config.hidden_act = "gelu"
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        EmbeddedEngine(model, max_running=2, stop_ids=[], detokenize=str)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that collects each order of ``Rows.rearrange``."""
    seen: list[list[int]] = []
    rearrange = Rows.rearrange

    def spy(rows: Rows, order: Sequence[int]) -> Any:
        seen.append(list(order))
        return rearrange(rows, order)

    monkeypatch.setattr(Rows, "rearrange", spy)
    monkeypatch.setattr("penstock.services.rollout.engines.embedded.batch.ATTEND_TOGETHER", 3)
    return seen


@pytest.mark.long
async def test_rows_that_change_places_stay_themselves(moves: list[list[int]], bench: Any) -> None:
    lengths = [200, 12, 160, 30, 90, 15, 120, 45, 20, 75, 180, 10, 60, 140, 25, 100]
    asked = [
        bench.ask(str(i), prompt=bench.prompt[: 1 + i % 4], max_new_tokens=n, seed=i, temperature=0.9)
        for i, n in enumerate(lengths)
    ]
    answers = [answer.samples[0] for answer in await asyncio.gather(*map(bench.engine.generate, asked))]
    num_moves = len(moves)
    assert num_moves, "nothing changed places"
    for length, request, sample in zip(lengths, asked, answers, strict=True):
        assert len(sample.token_ids) == length
        assert bench.error(sample, prompt=request.prompt_ids, temperature=0.9) < 1e-4
    alone = [(await bench.engine.generate(request)).samples[0] for request in asked]
    assert len(moves) == num_moves
    assert [sample.token_ids for sample in answers] == [sample.token_ids for sample in alone]


async def test_what_is_new_is_computed_with_what_runs(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    monkeypatch.setattr(batch, "decode", _counted(batch.decode, passes))
    long = asyncio.create_task(bench.engine.generate(bench.ask("long")))
    await bench.until_tokens(20)
    for number in range(5):
        [sample] = (await bench.engine.generate(bench.ask(str(number), max_new_tokens=10))).samples
        assert bench.error(sample) < 1e-4
    assert bench.error((await long).samples[0]) < 1e-4
    assert len(passes) == bench.length, "a forward pass for each token of the longest, and none besides"


async def test_a_torn_pass_takes_nothing_from_the_one_before(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PASS_TOKENS", 4)  # so that two new prompts are two passes
    passes: list[int] = []
    monkeypatch.setattr(batch, "decode", _counted(batch.decode, passes))
    await bench.update(1, seed=1, guard=lambda: len(passes) < 2)
    both = [bench.ask(str(i), prompt=bench.prompt[: 4 - i], max_new_tokens=1, seed=i) for i in range(2)]
    first, second = await asyncio.gather(*(bench.engine.generate(request) for request in both))
    assert [len(answer.samples[0].token_ids) for answer in (first, second)] == [1, 0]
    assert [answer.samples[0].finish for answer in (first, second)] == ["length", "abort"]
    assert bench.error(first.samples[0], seeds=(0, 1)) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("room", [4, 5, 7, 16])
async def test_long_prompts_are_divided_and_delay_no_running_completion(
    bench: Any, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Requests with shared, partly shared and short prompts arrive while a completion runs."""
    prompts = [[(3 * i + 5 * j) % 50 for j in range(length)] for i, length in enumerate((23, 2, 40, 9))]
    prompts.append([*prompts[2][:30], 1, 2, 3])
    asked = [
        bench.ask(f"{i}-{room}", prompt=prompt, n=1 + i % 3, max_new_tokens=6, seed=i, temperature=0.9)
        for i, prompt in enumerate(prompts)
    ]
    whole = [await bench.engine.generate(request) for request in asked]

    passes: list[int] = []
    monkeypatch.setattr(parts, "PASS_TOKENS", room)
    monkeypatch.setattr(batch, "decode", _counted(batch.decode, passes))
    long = asyncio.create_task(bench.engine.generate(bench.ask("long")))
    await bench.until_tokens(20)
    before = len(passes)
    divided = await asyncio.gather(*map(bench.engine.generate, asked))
    [sample] = (await long).samples
    assert max(passes[before:]) <= room + bench.max_running
    assert len(passes) == bench.length, "every pass sampled a token of the running completion"
    assert bench.error(sample) < 1e-4
    for request, one, other in zip(asked, whole, divided, strict=True):
        for first, second in zip(one.samples, other.samples, strict=True):
            assert first.token_ids == second.token_ids
            assert bench.error(second, prompt=request.prompt_ids, temperature=0.9) < 1e-4


async def test_a_prompt_shared_by_a_group_is_computed_once_although_divided(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    monkeypatch.setattr(parts, "PASS_TOKENS", 8)
    monkeypatch.setattr(batch, "decode", _counted(batch.decode, passes))
    await bench.engine.generate(bench.ask("group", prompt=[7] * 30, n=4, max_new_tokens=1))
    assert passes == [8, 8, 8, 6]


async def test_an_update_between_the_parts_of_a_prompt_leaves_nothing_of_the_old_weights(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PASS_TOKENS", 4)
    prompt, passes, reached, go_on = [5] * 41, [0], threading.Event(), threading.Event()
    decode = batch.decode

    def held_up(plan: Any, token_ids_T: torch.Tensor, *rest: Any) -> Any:
        found = decode(plan, token_ids_T, *rest)
        passes[0] += 1
        if passes[0] == 5:
            reached.set()
            assert go_on.wait(60)
        return found

    monkeypatch.setattr(batch, "decode", held_up)
    answer = asyncio.create_task(bench.engine.generate(bench.ask("new", prompt=prompt, n=2, max_new_tokens=5)))
    assert await asyncio.to_thread(reached.wait, 60)
    update = asyncio.create_task(bench.update(1, seed=1))
    async with asyncio.timeout(60):
        while not bench.engine._interrupt:  # the update waits for the end of this pass
            await asyncio.sleep(0.001)
    go_on.set()
    await update
    for sample in (await answer).samples:
        assert [span.version for span in sample.spans if span.end > span.start] == [1]
        assert bench.error(sample, prompt=prompt, seeds=(0, 1)) < 1e-4
    assert passes[0] == 5 + 11 + 4, "the whole prompt again, in eleven passes, and four more tokens"


def _counted(decode: Any, passes: list[int]) -> Any:
    def spy(plan: Any, token_ids_T: torch.Tensor, *rest: Any) -> Any:
        passes.append(len(token_ids_T))
        return decode(plan, token_ids_T, *rest)

    return spy
