"""Every engine returns exact log-probs, reproducible samples and correct finish reasons."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.shared.errors import ConfigError, Conflict, Unavailable
from penstock.shared.protocol.generation import GenResult


def ragged_prompts(num: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 54, rng.integers(1, 24)).tolist() for _ in range(num)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_a_plain_forward(bench: Any, temperature: float) -> None:
    prompts = ragged_prompts(8)

    async def later(i: int) -> GenResult:  # joins while the others decode
        await asyncio.sleep(0.004 * i)
        request = bench.ask(str(i), prompt=prompts[i], n=3, max_new_tokens=8 + 5 * i, temperature=temperature, seed=i)
        return await bench.engine.generate(request)

    results = await asyncio.gather(*(later(i) for i in range(len(prompts))))
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        for sample in result.samples:
            assert len(sample.token_ids) == 8 + 5 * i
            assert sample.finish == "length"
            assert [(span.version, span.start, span.end) for span in sample.spans] == [(0, 0, 8 + 5 * i)]
            assert bench.error(sample, prompt=prompt, temperature=temperature) < 1e-4


async def test_a_sample_depends_on_prompt_and_seed_alone(bench: Any) -> None:
    if not bench.seeded:
        pytest.skip("seeds have no effect on this engine here")
    alone = await bench.engine.generate(bench.ask("alone", n=1, seed=41, max_new_tokens=40))
    crowd = [bench.ask(f"c{i}", prompt=p, max_new_tokens=30, seed=i) for i, p in enumerate(ragged_prompts(6))]
    together, *_ = await asyncio.gather(
        bench.engine.generate(bench.ask("group", n=4, seed=40, max_new_tokens=40)),
        *(bench.engine.generate(request) for request in crowd),
    )
    assert together.samples[1].token_ids == alone.samples[0].token_ids
    assert len({tuple(sample.token_ids) for sample in together.samples}) == 4


async def test_without_a_seed_samples_differ(bench: Any) -> None:
    first = await bench.engine.generate(bench.ask("a", seed=None, max_new_tokens=20))
    second = await bench.engine.generate(bench.ask("b", seed=None, max_new_tokens=20))
    assert first.samples[0].token_ids != second.samples[0].token_ids


async def test_greedy_ignores_the_seed(bench: Any) -> None:
    one = await bench.engine.generate(bench.ask("a", temperature=0.0, seed=1, max_new_tokens=30))
    two = await bench.engine.generate(bench.ask("b", temperature=0.0, seed=2, max_new_tokens=30, n=2))
    assert one.samples[0].token_ids == two.samples[0].token_ids == two.samples[1].token_ids


async def test_a_stop_token_ends_a_sample_and_belongs_to_it(bench: Any) -> None:
    free = (await bench.engine.generate(bench.ask("free", max_new_tokens=40, **bench.repeatable))).samples[0]
    stop = free.token_ids[10]
    first = free.token_ids.index(stop)
    request = bench.ask("ended", max_new_tokens=40, stop_token_ids=(stop,), **bench.repeatable)
    ended = (await bench.engine.generate(request)).samples[0]
    assert ended.finish == "stop"
    assert ended.token_ids == free.token_ids[: first + 1]


async def test_end_of_sequence_ends_a_sample_unless_ignored(bench: Any) -> None:
    request = bench.ask("eos", n=12, ignore_eos=False, max_new_tokens=300, seed=3)
    samples = (await bench.engine.generate(request)).samples
    stopped = [sample for sample in samples if sample.finish == "stop"]
    assert stopped
    assert all(sample.token_ids.index(bench.eos) == len(sample.token_ids) - 1 for sample in stopped)
    assert all(bench.eos not in sample.token_ids for sample in samples if sample.finish == "length")


async def test_no_stop_before_min_new_tokens_and_logprobs_stay_untruncated(bench: Any) -> None:
    every = tuple(range(4, 54, 2))
    request = bench.ask("min", n=6, max_new_tokens=60, min_new_tokens=25, stop_token_ids=every, top_p=0.9, top_k=20)
    for sample in (await bench.engine.generate(request)).samples:
        assert len(sample.token_ids) >= 25
        assert not set(sample.token_ids[:24]).intersection(every)
        assert bench.error(sample) < 1e-4 or not bench.engine.caps.plain_logprobs


async def test_a_stop_string_ends_a_sample(bench: Any) -> None:
    free = (await bench.engine.generate(bench.ask("free", max_new_tokens=60, **bench.repeatable))).samples[0]
    letters = "0123456789+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$"
    text = "".join(letters[token - 4] if token >= 4 else "\0" for token in free.token_ids)
    stop = next(text[i : i + 3] for i in range(20, 57) if "\0" not in text[i : i + 3])
    request = bench.ask("ended", max_new_tokens=60, stop_strings=("never to be seen", stop), **bench.repeatable)
    ended = (await bench.engine.generate(request)).samples[0]
    assert ended.finish == "stop"
    assert ended.token_ids == free.token_ids[: text.index(stop) + 3]


async def test_more_samples_than_slots(bench: Any) -> None:
    request = bench.ask("many", n=3 * bench.max_running + 1, max_new_tokens=9, **bench.repeatable)
    result = await bench.engine.generate(request)
    assert [len(sample.token_ids) for sample in result.samples] == [9] * (3 * bench.max_running + 1)
    request = bench.ask("last", seed=7 + 3 * bench.max_running, max_new_tokens=9, **bench.repeatable)
    again = await bench.engine.generate(request)
    assert again.samples[0].token_ids == result.samples[-1].token_ids
    assert bench.engine.running == 0


async def test_a_request_starts_when_it_joins_the_batch(bench: Any) -> None:
    started: list[str] = []

    def ask(id: str, n: int, tokens: int) -> Any:
        request = bench.ask(id, n=n, max_new_tokens=tokens)
        return asyncio.create_task(bench.engine.generate(request, on_start=lambda: started.append(id)))

    running = ask("running", bench.max_running, 120)
    await bench.until_tokens(1)
    waiting = ask("waiting", 2, 3)
    await bench.until_tokens(bench.max_running)
    assert started == ["running"]
    assert not running.done()
    await asyncio.gather(running, waiting)
    assert started == ["running", "waiting"], "once each"


async def test_cancellation_frees_the_slots(bench: Any) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("long", n=bench.max_running)))
    await bench.until_tokens(50)
    assert bench.engine.running == bench.max_running
    task.cancel()
    await asyncio.wait([task])
    short = await bench.engine.generate(bench.ask("long", n=bench.max_running, max_new_tokens=3))
    assert [len(sample.token_ids) for sample in short.samples] == [3] * bench.max_running
    assert task.cancelled()
    assert bench.engine.running == 0


async def test_requests_that_cannot_be_served_are_refused(bench: Any) -> None:
    for request, reason in [
        (bench.ask("empty", prompt=()), "needs a prompt"),
        (bench.ask("long", max_new_tokens=600), "exceed"),
        (bench.ask("none", max_new_tokens=0), "max_new_tokens"),
        (bench.ask("strange", prompt=(5, 54)), "token ids"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            await bench.engine.generate(request)


async def test_an_id_is_used_once_at_a_time(bench: Any) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("twice", max_new_tokens=50)))
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="twice"):
        await bench.engine.generate(bench.ask("twice"))
    await task
    await bench.engine.generate(bench.ask("twice", max_new_tokens=2))


async def test_close_fails_what_is_in_flight(bench: Any) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("lost")))
    await bench.until_tokens(10)
    await bench.engine.close()
    await bench.engine.close()
    with pytest.raises(Unavailable, match="closed"):
        await task
    with pytest.raises(Unavailable):
        await bench.engine.generate(bench.ask("late"))
    with pytest.raises(Unavailable):
        await bench.engine.health()
