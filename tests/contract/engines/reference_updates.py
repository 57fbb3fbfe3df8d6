"""Versions that an engine's own processes open: how they are held and verified, and what a failure leaves.

Runs for such an engine; see ``test_engine_vllm.py`` and ``test_engine_sglang.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock.shared.errors import Conflict, PenstockError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Token, WeightInfo
from penstock.shared.weights import layout_of, open_publisher

LONG = tuple(5 + i % 40 for i in range(200))
JOB = "job_engines"
ELSEWHERE = pytest.mark.usefixtures("elsewhere")


async def completion(bench: Any, name: str, **sampling: Any) -> Any:
    request = bench.ask(name, **{"max_new_tokens": 30, **sampling})
    return (await bench.engine.generate(request)).samples[0]


async def test_no_cached_prefix_outlives_an_update(bench: Any) -> None:
    await completion(bench, "before", prompt=LONG)
    await bench.update(1, seed=1)
    sample = await completion(bench, "after", prompt=LONG)
    assert [span.version for span in sample.spans] == [1]
    assert bench.error(sample, prompt=LONG, seeds=(0, 1)) < 1e-4


@ELSEWHERE
async def test_a_cache_that_is_not_dropped_would_be_seen(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the test above can fail: without the flush the label is right and the log-probs are wrong."""
    halt = bench.engine._halt

    async def keep(*, clear_cache: bool) -> None:
        await halt(clear_cache=False)

    async def forget() -> None:
        return None

    await completion(bench, "before", prompt=LONG)
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "_halt", keep)
        patch.setattr(bench.engine, "_flush", forget)
        await bench.update(1, seed=1)
    sample = await completion(bench, "stale", prompt=LONG)
    assert [span.version for span in sample.spans] == [1]
    assert bench.error(sample, prompt=LONG, seeds=(0, 1)) > 0.1


async def test_streamed_tokens_have_the_labels_of_their_weights(bench: Any) -> None:
    received: list[Token] = []
    asking = asyncio.create_task(bench.engine.generate(bench.ask("stream", max_new_tokens=200), received.append))
    await bench.until_tokens(30)
    await bench.update(1, seed=1)
    sample = (await asking).samples[0]
    labels = [span.version for span in sample.spans for _ in range(span.start, span.end)]
    assert set(labels) == {0, 1}
    assert [(token.token_id, token.version) for token in received] == list(
        zip(sample.token_ids[:-1], labels[:-1], strict=True)
    )


async def test_tokens_tell_apart_weights_that_had_the_same_version(bench: Any) -> None:
    asking = asyncio.create_task(bench.engine.generate(bench.ask("ghost")))
    await bench.until_tokens(20)
    await bench.update(1, seed=1)
    first = bench.digests[1]
    await bench.until_tokens(20)
    await bench.update(1, seed=2)
    sample = (await asking).samples[0]
    spans = [(span.version, span.weights) for span in sample.spans]
    assert spans[-2:] == [(1, first[:16]), (1, bench.digests[1][:16])]


@pytest.mark.parametrize("wrong", ["missing", "name", "shape", "dtype"])
async def test_a_version_of_another_model_is_refused_and_the_old_one_stays(
    bench: Any, settings: Any, wrong: str
) -> None:
    weights = bench.weights(1)
    name, tensor = next(iter(weights.items()))
    if wrong == "missing":
        weights.popitem()
    else:
        changed = {"name": ("nobody", tensor), "shape": (name, tensor[:-1]), "dtype": (name, tensor.to(torch.bfloat16))}
        del weights[name]
        weights = dict([changed[wrong]]) | weights
    other = open_publisher("job_other", layout_of(weights.items()), settings)
    manifest = await asyncio.to_thread(other.publish, weights.items(), version=1, epoch=1)
    with pytest.raises(WeightsError, match=r"lacks|no parameter|the model has"):
        await bench.engine.stage(manifest, None)
    other.close()
    assert await bench.engine.weight_info() == WeightInfo(version=0, digest=bench.digests[0], dirty=False)
    assert bench.error(await completion(bench, "after")) < 1e-4


async def test_damaged_bytes_are_refused_by_the_process_that_reads_them(
    bench: Any, settings: Any, holders: Any
) -> None:
    manifest = await asyncio.to_thread(bench.publish, 1, 1)
    path = settings.shm_dir / manifest.refs[0].handle
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightsError, match="do not match digest"):
        await bench.engine.stage(manifest, None)
    assert holders() == set()
    assert (await bench.engine.weight_info()).version == 0


@ELSEWHERE
async def test_a_staged_version_is_held_until_its_update_ends(bench: Any, holders: Any) -> None:
    manifest = await asyncio.to_thread(bench.publish, 1, 1)
    way = await bench.engine.stage(manifest, None)
    assert (way.transport, way.fetched_bytes) == ("shm", 0)
    assert len(holders()) == 1
    assert os.getpid() not in holders(), "the lock is that of the process that reads"
    await bench.engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
    with pytest.raises(Conflict, match="version 1"):
        await bench.engine.begin_update(version=2, digest="", mode="in_place")
    await bench.engine.abort_update()
    await bench.engine.abort_update()
    assert holders() == set()
    with pytest.raises(WeightsError, match="not staged"):
        await bench.engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
    assert not (await bench.engine.weight_info()).dirty
    assert bench.error(await completion(bench, "after")) < 1e-4


async def test_memory_that_was_overwritten_before_the_commit_is_refused(bench: Any, settings: Any) -> None:
    manifest = await asyncio.to_thread(bench.publish, 1, 1)
    await bench.engine.stage(manifest, None)
    await bench.engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
    overwrite(settings.shm_dir / manifest.refs[0].handle)
    with pytest.raises(WeightsError, match="overwritten"):
        await bench.engine.commit_update()
    assert await bench.engine.weight_info() == WeightInfo(version=0, digest=bench.digests[0], dirty=False)
    assert bench.error(await completion(bench, "after")) < 1e-4


def overwrite(path: Path) -> None:
    """Raise the sequence of a slot, as a writer does that ignores the lock."""
    with path.open("r+b") as file:
        file.seek(8)
        head = file.read(8)
        file.seek(8)
        file.write((int.from_bytes(head, "little") + 1).to_bytes(8, "little"))


async def test_a_load_that_fails_makes_the_engine_dirty_until_a_full_update(
    bench: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of names is disabled here, so the engine meets an unknown name half-way through the load."""
    weights = list(bench.weights(1).items())
    strange = [*weights[: len(weights) // 2], ("model.layers.0.nobody.weight", torch.ones(3)), *weights]
    strange = list(dict(strange).items())
    other = open_publisher("job_strange", layout_of(strange), settings)
    manifest = await asyncio.to_thread(other.publish, strange, version=1, epoch=1)

    async def half_way() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("penstock.services.rollout.engines.adapter.check_layout", lambda layout, expected: None)
            await bench.engine.stage(manifest, None)
        await bench.engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
        await bench.engine.commit_update()

    await bench.fail_half_way(half_way, "load weights")
    other.close()


async def test_requests_that_cannot_be_ended_after_a_failed_load_get_no_more_tokens(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such tokens would come from half-loaded weights. The test ends the engine."""
    engine = bench.engine
    received: list[Token] = []
    asking = asyncio.create_task(engine.generate(bench.ask("cut"), received.append))
    await bench.until_tokens(20)

    async def fail(label: str) -> None:
        raise WeightsError("half loaded")

    async def unreachable() -> None:
        raise Unavailable("out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_load", fail)
        patch.setattr(engine._dispatch, "end_started", unreachable)
        with pytest.raises(WeightsError, match="half loaded"):
            await bench.update(1, seed=1)
    known = len(received)
    with pytest.raises(Unavailable, match="half-loaded weights: out of reach"):
        await engine.health()
    assert not await settled(asking)
    assert len(received) == known
    await engine.close()
    with pytest.raises(Unavailable):
        await asking


async def settled(task: asyncio.Task[Any]) -> bool:
    """Return True if a task ends within a moment."""
    done, _ = await asyncio.wait([task], timeout=0.3)
    return bool(done)


async def test_scores_are_those_of_a_plain_forward(bench: Any) -> None:
    text = [*bench.prompt, 20, 21, 22, 9]
    scores = await bench.engine.score(text, top_logprobs=2)
    plain = bench.plain(text)
    expected = [float(plain[i, token]) for i, token in enumerate(text[1:])]
    assert scores.version == 0
    assert scores.logprobs == pytest.approx(expected, abs=1e-4)
    assert [row[0][0] for row in scores.top] == plain[:-1].argmax(-1).tolist()


@ELSEWHERE
async def test_a_process_that_dies_with_a_version_open_frees_it_and_the_engine_says_so(
    bench: Any, holders: Any
) -> None:
    manifest = await asyncio.to_thread(bench.publish, 1, 1)
    await bench.engine.stage(manifest, None)
    (holder,) = holders()
    assert holder in {child.pid for child in psutil.Process().children(recursive=True)}
    asking = asyncio.create_task(bench.engine.generate(bench.ask("lost")))
    await bench.until_tokens(5)
    os.kill(holder, signal.SIGKILL)
    await bench.until_unavailable(asking)
    assert holders() == set()
    await bench.engine.close()


@ELSEWHERE
async def test_a_process_that_dies_in_an_update_serves_no_version_of_it(
    bench: Any, holders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test stops the process during the load and kills it half-way; this ends the engine."""
    engine, load = bench.engine, bench.engine._load

    async def torn(label: str) -> None:
        (holder,) = holders()
        os.kill(holder, signal.SIGSTOP)
        loading = asyncio.create_task(load(label))
        done, _ = await asyncio.wait({loading}, timeout=1.0)
        assert not done, "nothing was loaded"
        os.kill(holder, signal.SIGKILL)
        await loading

    asking = asyncio.create_task(engine.generate(bench.ask("crossing")))
    await bench.until_tokens(5)
    async with asyncio.timeout(240):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_load", torn)
            with pytest.raises(PenstockError):
                await bench.update(1, seed=1)
        with pytest.raises(PenstockError):
            await engine.generate(bench.ask("refused"))
        (answer,) = await asyncio.gather(asking, return_exceptions=True)
    if not isinstance(answer, PenstockError):
        assert answer.samples[0].finish == "abort"
        assert [span.version for span in answer.samples[0].spans] == [0]
        assert bench.error(answer.samples[0]) < 1e-4
    assert await engine.weight_info() == WeightInfo(version=0, digest=bench.digests[0], dirty=True)
    assert holders() == set()
    await engine.close()
