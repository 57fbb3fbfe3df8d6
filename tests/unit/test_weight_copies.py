"""Copies of weights by several threads have the same bytes and digest, whichever thread copies a piece."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.shared.errors import WeightsError
from penstock.shared.weights import flat
from penstock.shared.weights.flat import digest_of, digest_of_tensors, fill, layout_of, view

LARGE = 50_001


def tensors(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("first", torch.randn(LARGE, generator=generator)),
        ("scalar", torch.tensor(seed)),
        ("half", torch.randn(LARGE, generator=generator).to(torch.bfloat16)),
        ("transposed", torch.randn(100, 301, generator=generator).T),
        ("empty", torch.empty(0, 3)),
        ("last", torch.randn(3, LARGE, generator=generator)),
    ]


@pytest.fixture(params=[1, 2, 8])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit the cores that this process may use, and treat small tensors as large; return the number of cores."""
    number: int = request.param
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(number)))
    for name, value in (("_BESIDE_BYTES", 4096), ("_PIECE_BYTES", 1024), ("_CHUNK_BYTES", 256)):
        monkeypatch.setattr(flat, name, value)
    return number


def check(given: list[tuple[str, Tensor]], order: list[tuple[str, Tensor]]) -> None:
    layout = layout_of(given)
    buffer = np.full(layout.nbytes, 7, np.uint8)
    assert fill(buffer, layout, order) == digest_of(buffer) == digest_of_tensors(given)
    for name, tensor in view(buffer, layout).items():
        assert torch.equal(tensor, dict(given)[name]), name


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_threads_gives_the_same_digest(cores: int, seed: int) -> None:
    given = tensors(seed)
    order = random.Random(seed).sample(given, len(given)) if seed % 2 else given
    check(given, order)


def test_the_caller_hashes_what_helpers_copied(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several cores the test leaves few pieces or none to the caller, so that helpers copy the others."""
    caller, take, helped = threading.get_ident(), flat._take, list[int]()

    def taken(free: set[int], number: int) -> bool:
        if threading.get_ident() == caller:
            return number % flat._KEEP == 0 and take(free, number) if cores == 2 else cores == 1
        helped.append(number)
        return take(free, number)

    monkeypatch.setattr(flat, "_take", taken)
    check(tensors(1), tensors(1))
    assert bool(helped) == (cores > 1)


def test_a_tensor_that_does_not_fit_ends_the_threads(cores: int) -> None:
    given, before = tensors(1), set(threading.enumerate())
    layout = layout_of(given)
    with pytest.raises(WeightsError, match=r"5 tensors of layout .* are missing"):
        fill(np.empty(layout.nbytes, np.uint8), layout, given[:1])
    assert not [one for one in threading.enumerate() if one not in before and one.name.startswith("weights")]


@pytest.mark.parametrize("size", [0, 1000, 12 << 20])
def test_published_weights_can_be_freed(size: int) -> None:
    """FSDP frees the parameters that it gathered, but torch cannot free memory of which NumPy has a view."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    layout = layout_of([("w", tensor)])
    fill(np.zeros(layout.nbytes, np.uint8), layout, [("w", tensor)])
    tensor.untyped_storage().resize_(0)
