"""Sessions of requests: each turn reuses the cache of the turn before, and never after an update."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from torch import Tensor

from penstock.services.rollout.engines.embedded import batch, parts
from penstock.services.rollout.engines.sampling import draw
from penstock.shared.protocol.generation import GenRequest, Sample

STOPS = tuple(range(5, 25))
APPENDED = (30, 31, 32, 33, 34, 35, 36)
"""Tokens appended between two turns, cut to different lengths."""


def turn(
    bench: Any, name: str, prompt: Sequence[int], number: int, *, last: bool = False, **sampling: Any
) -> GenRequest:
    request = bench.ask(f"{name}/{number}", prompt=prompt, stop_token_ids=STOPS, max_new_tokens=40, **sampling)
    return msgspec.structs.replace(request, session=name, last=last)  # type: ignore[no-any-return]


async def play(bench: Any, name: str, seed: int, *, session: bool = True, between: Any = None) -> list[Sample]:
    """Generate three turns, in one session or as separate requests; return their samples."""
    prompt, samples = list(bench.prompt), []
    for number in range(3):
        request = turn(bench, name, prompt, number, last=number == 2, seed=seed + number, temperature=0.9)
        if not session:
            request = msgspec.structs.replace(request, session="")
        [sample] = (await bench.engine.generate(request)).samples
        samples.append(sample)
        assert bench.error(sample, prompt=prompt, temperature=0.9, seeds=(0, 1)) < 1e-4
        prompt += [*sample.token_ids, *APPENDED[: 1 + (seed + number) % 7]]
        if between is not None:
            await between(number)
    return samples


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the number of rows of each computation on a held cache."""
    seen: list[int] = []
    extending = parts.extending

    def spy(rows: Any, cache: Any, start: int, *rest: Any) -> Any:
        part = extending(rows, cache, start, *rest)
        seen.append(part.stop - part.start)
        return part

    monkeypatch.setattr(parts, "extending", spy)
    return seen


async def test_a_session_gives_what_separate_requests_give(bench: Any, extensions: list[int]) -> None:
    names = [f"s{i}" for i in range(8)]
    held = await asyncio.gather(*(play(bench, name, 10 * i) for i, name in enumerate(names)))
    assert sum(extensions) > 8, "the second and third turns were not computed from the start"
    before = len(extensions)
    apart = await asyncio.gather(*(play(bench, name, 10 * i, session=False) for i, name in enumerate(names)))
    assert len(extensions) == before
    for mine, theirs in zip(held, apart, strict=True):
        assert [sample.token_ids for sample in mine] == [sample.token_ids for sample in theirs]


async def test_nothing_held_outlives_an_update(bench: Any, extensions: list[int]) -> None:
    async def between(number: int) -> None:
        if number == 0:
            await bench.update(1, seed=1)

    samples = await play(bench, "s", 3, between=between)
    assert [sample.spans[0].version for sample in samples] == [0, 1, 1]
    assert sum(extensions) <= 1, "only the third turn may go on from the second"


async def test_nothing_is_held_of_a_cache_that_was_just_zeroed(
    bench: Any, extensions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows end in one step, the first with a log-prob that is not finite: the cache of the other is zeroed, too."""

    def poisoned(logits_RV: Tensor, how: Any) -> tuple[Tensor, Tensor]:
        token_R, logprob_R = draw(logits_RV, how)
        if len(logprob_R) == 2:
            logprob_R[0] = math.nan
        return token_R, logprob_R

    monkeypatch.setattr(batch, "draw", poisoned)
    requests = [
        msgspec.structs.replace(bench.ask(name, stop_token_ids=range(54), max_new_tokens=9), session=name)
        for name in ("broken", "whole")
    ]
    broken, whole = [result.samples[0] for result in await asyncio.gather(*map(bench.engine.generate, requests))]
    assert math.isnan(broken.logprobs[0])
    assert (whole.finish, len(whole.token_ids)) == ("stop", 1)
    prompt = [*bench.prompt, *whole.token_ids, *APPENDED]
    [after] = (await bench.engine.generate(turn(bench, "whole", prompt, 1))).samples
    assert bench.error(after, prompt=prompt) < 1e-4
    assert extensions == []


async def test_another_prompt_under_the_same_name_is_computed_whole(bench: Any, extensions: list[int]) -> None:
    await bench.engine.generate(turn(bench, "s", bench.prompt, 0))
    prompt = [9, 9, 9, *bench.prompt, 12]
    [sample] = (await bench.engine.generate(turn(bench, "s", prompt, 1))).samples
    assert bench.error(sample, prompt=prompt) < 1e-4
    assert extensions == []


async def test_old_sessions_make_room(bench: Any, extensions: list[int]) -> None:
    """With more sessions than the engine holds, the oldest are computed again, correctly."""
    number = 2 * bench.max_running
    first = [
        (await bench.engine.generate(turn(bench, f"s{i}", bench.prompt, 0, seed=i))).samples[0] for i in range(number)
    ]
    for i, sample in enumerate(first):
        prompt = [*bench.prompt, *sample.token_ids, *APPENDED[:2]]
        [after] = (await bench.engine.generate(turn(bench, f"s{i}", prompt, 1, last=True, seed=i))).samples
        assert bench.error(after, prompt=prompt) < 1e-4
    stopped = sum(sample.finish == "stop" for sample in first[-bench.max_running :])
    assert len(extensions) == stopped > 0
