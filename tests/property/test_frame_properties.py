"""Frames survive a round trip, and whatever bytes arrive, decoding ends in a tree or a FrameError."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.shared.errors import FrameError
from penstock.shared.protocol.frame import BFloat16, decode_frame, encode_frame

_DTYPES = [
    *("float64", "float32", "float16", "bool", ">f4", ">i8"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
]

_arrays = st.sampled_from(_DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)
_bfloats = hnp.arrays("uint16", hnp.array_shapes(max_dims=2, max_side=4)).map(BFloat16)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | _text | st.binary(max_size=8)
    | _arrays | _bfloats
)  # fmt: skip
_keys = _text | st.sampled_from(["__t__", "dtype", "shape", "offset", "nbytes"])
trees = st.recursive(
    _leaves, lambda child: st.lists(child, max_size=4) | st.dictionaries(_keys, child, max_size=4), max_leaves=12
)


def same(a: Any, b: Any) -> bool:
    """Return True if both are equal in type, shape and bits (the sign of zero and NaN included)."""
    if isinstance(a, BFloat16):
        return isinstance(b, BFloat16) and same(a.bits, b.bits)
    if isinstance(a, np.ndarray):
        little = a.astype(a.dtype.newbyteorder("<"))
        return (
            isinstance(b, np.ndarray)
            and (a.shape, little.dtype) == (b.shape, b.dtype)
            and little.tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


@given(trees, st.integers(0, 9))
def test_decoding_inverts_encoding_at_any_address(tree: Any, shift: int) -> None:
    data = bytes(shift) + b"".join(encode_frame(tree))
    assert same(tree, decode_frame(memoryview(data)[shift:]))


@given(trees)
def test_arrays_of_an_aligned_buffer_are_views_of_it(tree: Any) -> None:
    data = bytearray(b"".join(encode_frame({"tree": tree, "probe": np.arange(7, dtype=np.float32)})))
    probe = decode_frame(data)["probe"]
    assert np.shares_memory(probe, np.frombuffer(data, np.uint8))
    assert probe.flags.aligned


def decodes_or_refuses(data: bytes) -> None:
    """Check that decoding raises only FrameError, and takes at most a small multiple of the input's memory."""
    peak = min(peak_of(data) for _ in range(2))  # other threads of the process may allocate memory, too
    assert peak < 100_000 + 200 * len(data), peak


def peak_of(data: bytes) -> int:
    tracemalloc.start()
    try:
        decode_frame(data)
    except FrameError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_without_harm(data: bytes) -> None:
    decodes_or_refuses(data)


@given(st.binary(max_size=200))
def test_random_headers_are_refused_without_harm(header: bytes) -> None:
    decodes_or_refuses(b"PSF1" + len(header).to_bytes(4, "little") + header + bytes(128))


@settings(max_examples=300)
@given(trees, st.data())
def test_flipped_bits_are_refused_without_harm(tree: Any, data: st.DataObject) -> None:
    frame = bytearray(b"".join(encode_frame(tree)))
    header_bits = 8 * (8 + int.from_bytes(frame[4:8], "little"))
    for bit in data.draw(st.lists(st.integers(0, header_bits - 1), min_size=1, max_size=3)):
        frame[bit // 8] ^= 1 << bit % 8
    decodes_or_refuses(bytes(frame))


@given(trees, st.data())
def test_truncated_frames_are_refused_without_harm(tree: Any, data: st.DataObject) -> None:
    frame = b"".join(encode_frame(tree))
    decodes_or_refuses(frame[: data.draw(st.integers(0, len(frame)))])


_wild = st.integers(-(2**63), 2**63) | st.sampled_from([0, 1, 4, 8, 64, 128])


@settings(max_examples=300)
@given(st.sampled_from([*_DTYPES, "bfloat16", "object", "S4"]), st.lists(_wild, max_size=10), _wild, _wild)
def test_tensor_claims_never_reach_past_the_buffer(dtype: str, shape: list[int], offset: int, nbytes: int) -> None:
    claim = msgspec.msgpack.encode((dtype, shape, offset, nbytes))
    header = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, claim))
    decodes_or_refuses(b"PSF1" + len(header).to_bytes(4, "little") + header + bytes(-(8 + len(header)) % 64 + 128))
