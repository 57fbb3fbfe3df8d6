"""Deltas of weights: applied to the earlier bits they give the later ones, whatever these mean, and stay small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.shared.errors import WeightsError
from penstock.shared.weights.delta import MAX_SHARE, apply, encode
from penstock.shared.weights.flat import fill, layout_of

Bytes = NDArray[np.uint8]

SPECIAL = {
    torch.bfloat16: [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x3F80],
    torch.float16: [0x0000, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x3C00],
    torch.float32: [0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x3F800000],
}
"""Bits of both zeros, the smallest number, infinities, NaNs with several payloads, and 1."""


def buffer_of(bits: Bytes, dtype: torch.dtype) -> Bytes:
    """Return the flat buffer that a publisher makes of a tensor with these bits."""
    tensors = [("w", torch.from_numpy(bits).view(dtype))]
    layout = layout_of(tensors)
    buffer = np.full(layout.nbytes, 0xAB, np.uint8)
    fill(buffer, layout, tensors)
    return buffer


@st.composite
def versions(draw: st.DrawFn) -> tuple[Bytes, Bytes]:
    """Two versions of one tensor; some, all or none of its elements changed, each to any bits."""
    dtype = draw(st.sampled_from(list(SPECIAL)))
    unsigned = np.uint32 if dtype == torch.float32 else np.uint16
    element = st.sampled_from(SPECIAL[dtype]) | st.integers(0, int(np.iinfo(unsigned).max))
    before = np.full(draw(st.integers(1, 900)), draw(element), unsigned)
    for at in draw(st.lists(st.integers(0, len(before) - 1), max_size=20)):
        before[at] = draw(element)
    after = before.copy()
    if draw(st.booleans()):
        places = st.lists(st.integers(0, len(after) - 1), max_size=30)
        for at in draw(places):
            after[at] = draw(element)
    else:
        after ^= unsigned(draw(element))
    return buffer_of(before.view(np.uint8), dtype), buffer_of(after.view(np.uint8), dtype)


def share_of_changed_words(before: Bytes, after: Bytes) -> float:
    pairs = zip(before.reshape(-1, 2).tolist(), after.reshape(-1, 2).tolist(), strict=True)
    changed = [one != other for one, other in pairs]
    return sum(changed) / len(changed)


@given(versions())
def test_a_delta_gives_the_bits_of_the_later_version(pair: tuple[Bytes, Bytes]) -> None:
    before, after = pair
    kept, delta = before.copy(), encode(before, after)
    assert (delta is None) == (share_of_changed_words(before, after) > MAX_SHARE)
    if delta is None:
        return
    assert len(delta) < 0.4 * len(after) + 4
    assert len(delta) < len(after), "a receiver tells a delta from a whole bucket by its size"
    target = np.full_like(before, 0xCD)
    apply(before, delta, target)
    assert target.tobytes() == after.tobytes()
    assert before.tobytes() == kept.tobytes()


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65_535, 65_536])
def test_gaps_of_any_length_between_changes(gap: int) -> None:
    before = np.zeros(2 * (gap + 100_032), np.uint8)
    after = before.copy()
    after.view(np.uint16)[[gap, 2 * gap + 1, -1]] = 7
    delta, target = encode(before, after), np.empty_like(before)
    assert delta is not None
    apply(before, delta, target)
    assert target.tobytes() == after.tobytes()


def test_nothing_and_everything_changed() -> None:
    before = np.arange(64, dtype=np.uint8).repeat(16)
    nothing = encode(before, before.copy())
    assert nothing is not None
    assert nothing.tobytes() == bytes(4)
    assert encode(before, before ^ np.uint8(255)) is None
    words, quarter = before.copy(), len(before) // 8
    words.view(np.uint16)[:quarter] ^= 1
    assert encode(before, words) is not None
    words.view(np.uint16)[quarter] ^= 1
    assert encode(before, words) is None


def test_two_percent_of_the_elements_take_about_three_bytes_each() -> None:
    generator = np.random.default_rng(0)
    before = generator.integers(0, 256, 2_000_000, np.uint8)
    after = before.copy()
    places = generator.choice(1_000_000, 20_000, replace=False)
    after.view(np.uint16)[places] ^= 1
    delta = encode(before, after)
    assert delta is not None
    assert 60_000 < len(delta) < 61_000


@given(st.binary(max_size=200), st.integers(0, 2))
def test_bytes_that_are_no_delta_raise_nothing_else(data: bytes, num_changed: int) -> None:
    """A head with few changes lets the bytes behind it pass the first check."""
    for delta in (data, num_changed.to_bytes(4, "little") + data):
        try:
            apply(np.zeros(128, np.uint8), np.frombuffer(delta, np.uint8), np.empty(128, np.uint8))
        except WeightsError as error:
            assert "does not fit 128 bytes" in str(error)


@given(versions(), st.data())
def test_a_delta_that_is_cut_off_or_too_long_is_refused(pair: tuple[Bytes, Bytes], data: st.DataObject) -> None:
    delta = encode(*pair)
    if delta is None or len(delta) == 4:
        return
    target = np.empty_like(pair[0])
    for wrong in (delta[: data.draw(st.integers(0, len(delta) - 1))], np.append(delta, np.uint8(0))):
        with pytest.raises(WeightsError, match="does not fit"):
            apply(pair[0], wrong, target)
