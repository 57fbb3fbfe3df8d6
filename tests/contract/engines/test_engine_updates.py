"""Weight updates under load: each token has the label of the weights that sampled it, and no cache outlives them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from penstock.shared.errors import Conflict, WeightsError
from penstock.shared.protocol.generation import WeightInfo

TENSORS = pytest.mark.usefixtures("by_tensors")
"""Marks tests of engines that receive tensors; the others have ``reference_updates.py``."""
MODES = pytest.mark.parametrize("mode", ["swap", "in_place"])


@MODES
async def test_an_update_in_flight_is_labelled_and_exact(bench: Any, mode: str) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("crossing", n=3, temperature=0.8)))
    await bench.until_tokens(60)
    pause_s = await bench.update(1, seed=1, mode=mode)
    await bench.until_tokens(60)
    await bench.update(2, seed=2, mode=mode)
    assert 0 <= pause_s < 5
    for sample in (await task).samples:
        assert [span.version for span in sample.spans] == [0, 1, 2]
        assert sample.spans[0].start == 0
        assert sample.spans[-1].end == len(sample.token_ids) == bench.length
        assert all(a.end == b.start for a, b in zip(sample.spans, sample.spans[1:], strict=False))
        assert bench.error(sample, temperature=0.8, seeds=(0, 1, 2)) < 1e-4
    assert await bench.engine.weight_info() == WeightInfo(version=2, digest=bench.digests[2], dirty=False)


async def test_a_version_without_tokens_leaves_no_span(bench: Any) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("paused", max_new_tokens=100)))
    await bench.until_tokens(10)
    await bench.engine.pause("keep")
    await bench.update(1, seed=1)
    await bench.update(2, seed=2)
    await bench.engine.resume()
    sample = (await task).samples[0]
    assert [span.version for span in sample.spans] == [0, 2]
    assert bench.error(sample, seeds=(0, 1, 2)) < 1e-4


@TENSORS
async def test_tokens_tell_apart_weights_that_had_the_same_version(bench: Any) -> None:
    """The successor of a replaced trainer created another policy with the same version number."""
    task = asyncio.create_task(bench.engine.generate(bench.ask("ghost")))
    await bench.update(1, seed=1, digest="1" * 32)
    await bench.until_tokens(20)
    await bench.update(1, seed=2, digest="2" * 32)
    sample = (await task).samples[0]
    assert [(span.version, span.weights) for span in sample.spans[-2:]] == [(1, "1" * 16), (1, "2" * 16)]


async def test_new_requests_see_the_new_weights_only(bench: Any) -> None:
    old = (await bench.engine.generate(bench.ask("old", max_new_tokens=30))).samples[0]
    await bench.update(1, seed=1)
    new = (await bench.engine.generate(bench.ask("new", max_new_tokens=30))).samples[0]
    assert [span.version for span in new.spans] == [1]
    assert new.token_ids != old.token_ids
    assert bench.error(new, seeds=(0, 1)) < 1e-4


@TENSORS
async def test_a_swap_that_lacks_a_parameter_leaves_the_old_version(bench: Any) -> None:
    before = (await bench.engine.generate(bench.ask("before", max_new_tokens=30))).samples[0]
    weights = bench.weights(1)
    weights.popitem()
    await bench.engine.begin_update(version=1, digest="d1", mode="swap")
    await bench.engine.load_chunk(weights)
    with pytest.raises(WeightsError, match="lacks 1 parameters"):
        await bench.engine.commit_update()
    assert await bench.engine.weight_info() == WeightInfo(version=0, digest="", dirty=False)
    assert (await bench.engine.generate(bench.ask("after", max_new_tokens=30))).samples[0] == before
    await bench.update(1, seed=1)


@TENSORS
@pytest.mark.parametrize("wrong", ["name", "shape", "dtype"])
async def test_a_bad_chunk_ends_a_swap_and_leaves_the_old_version(bench: Any, wrong: str) -> None:
    weights = bench.weights(1)
    name, tensor = next(iter(weights.items()))
    chunk = {"name": {"nobody": tensor}, "shape": {name: tensor[:-1]}, "dtype": {name: tensor.to(torch.bfloat16)}}[
        wrong
    ]
    await bench.engine.begin_update(version=1, digest="d1", mode="swap")
    with pytest.raises(WeightsError):
        await bench.engine.load_chunk(chunk)
    assert await bench.engine.weight_info() == WeightInfo(version=0, digest="", dirty=False)
    await bench.update(1, seed=1)
    assert (await bench.engine.weight_info()).version == 1


@TENSORS
async def test_a_failed_update_in_place_makes_the_engine_dirty_until_a_full_one(bench: Any) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("cut")))
    await bench.until_tokens(20)
    weights = bench.weights(1)
    name = next(iter(weights))
    await bench.engine.begin_update(version=1, digest="d1", mode="in_place")
    await bench.engine.load_chunk({name: weights[name]})
    with pytest.raises(WeightsError):
        await bench.engine.load_chunk({"nobody": weights[name]})
    cut = (await task).samples[0]
    assert cut.finish == "abort"
    assert bench.error(cut) < 1e-4
    assert (await bench.engine.weight_info()).dirty
    with pytest.raises(WeightsError, match="dirty"):
        await bench.engine.generate(bench.ask("refused"))
    await bench.update(2, seed=2, mode="in_place")
    clean = (await bench.engine.generate(bench.ask("clean", max_new_tokens=30))).samples[0]
    assert bench.error(clean, seeds=(0, 1, 2)) < 1e-4
    assert await bench.engine.weight_info() == WeightInfo(version=2, digest="d2", dirty=False)


@TENSORS
async def test_an_incomplete_update_in_place_is_dirty(bench: Any) -> None:
    weights = bench.weights(1)
    weights.popitem()
    await bench.engine.begin_update(version=1, digest="d1", mode="in_place")
    await bench.engine.load_chunk(weights)
    with pytest.raises(WeightsError, match="lacks"):
        await bench.engine.commit_update()
    assert (await bench.engine.weight_info()).dirty
    await bench.update(1, seed=1)  # a full swap cleans as well
    assert not (await bench.engine.weight_info()).dirty


@TENSORS
@MODES
async def test_giving_up_is_dirty_only_after_a_copy(bench: Any, mode: str) -> None:
    weights = bench.weights(1)
    name = next(iter(weights))
    await bench.engine.begin_update(version=1, digest="d1", mode=mode)
    await bench.engine.abort_update()
    await bench.engine.abort_update()
    assert not (await bench.engine.weight_info()).dirty
    await bench.engine.begin_update(version=1, digest="d1", mode=mode)
    await bench.engine.load_chunk({name: weights[name]})
    await bench.engine.abort_update()
    assert (await bench.engine.weight_info()).dirty is (mode == "in_place")


@TENSORS
async def test_requests_wait_while_weights_are_copied_in_place(bench: Any) -> None:
    await bench.engine.begin_update(version=1, digest="d1", mode="in_place")
    held = asyncio.create_task(bench.engine.generate(bench.ask("held", max_new_tokens=10)))
    await bench.engine.load_chunk(bench.weights(1))
    await asyncio.sleep(0.03)
    assert not held.done()
    assert await bench.engine.commit_update() >= 0.03
    sample = (await held).samples[0]
    assert [span.version for span in sample.spans] == [1]
    assert bench.error(sample, seeds=(0, 1)) < 1e-4


@TENSORS
async def test_updates_are_opened_once_and_in_order(bench: Any) -> None:
    with pytest.raises(Conflict):
        await bench.engine.load_chunk({})
    with pytest.raises(Conflict):
        await bench.engine.commit_update()
    await bench.engine.begin_update(version=1, digest="d1", mode="swap")
    with pytest.raises(Conflict, match="version 1"):
        await bench.engine.begin_update(version=2, digest="d2", mode="swap")


@TENSORS
async def test_weights_that_are_overwritten_under_a_step_spoil_no_token(bench: Any) -> None:
    intact = True
    await bench.update(1, seed=1, guard=lambda: intact)
    task = asyncio.create_task(bench.engine.generate(bench.ask("torn", n=4)))
    await bench.until_tokens(80)
    intact = False
    for sample in (await task).samples:
        assert sample.finish == "abort"
        assert len(sample.token_ids) < bench.length
        assert bench.error(sample, seeds=(0, 1)) < 1e-4
    assert (await bench.engine.weight_info()).dirty
    await bench.update(2, seed=2)
    assert (await bench.engine.generate(bench.ask("well", max_new_tokens=5))).samples[0].finish == "length"


@TENSORS
async def test_weights_that_are_gone_before_the_commit_are_refused(bench: Any) -> None:
    with pytest.raises(WeightsError, match="overwritten"):
        await bench.update(1, seed=1, guard=lambda: False)
    assert await bench.engine.weight_info() == WeightInfo(version=0, digest="", dirty=False)
