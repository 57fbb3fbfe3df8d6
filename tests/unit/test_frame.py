"""Frames: what they hold, what they refuse, and their bytes."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.shared.errors import FrameError, ProtocolError
from penstock.shared.protocol.frame import MAX_DEPTH, MAX_HEADER_BYTES, BFloat16, decode_frame, encode_frame


def frame_of(header: bytes, body: bytes = bytes(128)) -> bytes:
    """Return a frame with a header written by hand."""
    return b"PSF1" + len(header).to_bytes(4, "little") + header + bytes(-(8 + len(header)) % 64) + body


def tensor_frame(dtype: str, shape: list[int], offset: int, nbytes: int, body: bytes = bytes(128)) -> bytes:
    """Return a frame whose header claims one tensor of this description."""
    claim = msgspec.msgpack.encode((dtype, shape, offset, nbytes))
    return frame_of(msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, claim)}), body)


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def test_bytes_of_the_format_are_pinned() -> None:
    data = b"".join(encode_frame({"a": np.array([1, 2], np.int16), "b": 3}))
    assert data[:8] == b"PSF1" + (20).to_bytes(4, "little")
    assert data[8:64] == b"\x82\xa1a\xc7\x0b\x01\x94\xa5int16\x91\x02\x00\x04\xa1b\x03" + bytes(36)
    assert data[64:] == b"\x01\x00\x02\x00" + bytes(60)


def test_blobs_are_aligned_and_large_arrays_are_not_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    parts = encode_frame({"odd": np.zeros(3, np.uint8), "array": array})
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts if len(part))
    data = bytearray(b"".join(parts))
    start = np.frombuffer(data, np.uint8).ctypes.data
    assert [(a.ctypes.data - start) % 64 for a in decode_frame(data).values()] == [0, 0]


def test_users_dict_cannot_pass_for_a_tensor() -> None:
    for tree in ({"__t__": ["float32", [2], 0, 8]}, ["float32", [2], 0, 8], {"dtype": "float32", "shape": [2]}):
        assert decode_frame(b"".join(encode_frame(tree))) == tree


def test_views_of_bytes_are_read_only() -> None:
    array = decode_frame(b"".join(encode_frame(np.ones(4))))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2


def test_strided_and_scalar_arrays_keep_shape_and_values() -> None:
    tree = {"t": np.arange(6.0).reshape(2, 3).T, "zero_d": np.array(5), "scalar": np.float32(0.5), "flag": np.True_}
    out = decode_frame(b"".join(encode_frame(tree)))
    np.testing.assert_array_equal(out["t"], tree["t"])
    assert out["zero_d"].shape == ()
    assert (out["scalar"], out["flag"]) == (0.5, True)
    assert type(out["scalar"]) is float


@pytest.mark.parametrize(
    "tree",
    [
        {1: "a"},
        {"a": object()},
        {"a": {1, 2}},
        {"a": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
        {"a": msgspec.msgpack.Ext(1, b"")},
        2**64,
        "\ud800",
        np.array(["a"]),
        np.array([object()]),
        np.array([1j]),
        np.complex64(1),
        np.zeros((1,) * 9),
        BFloat16(np.zeros(2, np.float32)),
        nested(MAX_DEPTH + 1),
        "x" * (MAX_HEADER_BYTES + 1),
    ],
)
def test_encoding_refuses_what_it_cannot_give_back(tree: Any) -> None:
    with pytest.raises(FrameError):
        encode_frame(tree)


def test_a_tree_of_the_greatest_depth_is_accepted() -> None:
    assert decode_frame(b"".join(encode_frame(nested(MAX_DEPTH)))) == nested(MAX_DEPTH)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too short"),
        (b"PSF1", "too short"),
        (b"JUNK" + bytes(60), "magic"),
        (b"PSF1" + b"\xff" * 4 + bytes(60), "does not fit"),
        (frame_of(b"\xc1"), "does not decode"),
        (frame_of(b"\x91" * 5000), "does not decode"),
        (frame_of(b"\x91" * 40 + b"\x01"), "nested deeper"),
        (frame_of(b"\xa1\xc0"), "does not decode"),
        (frame_of(b"\x81\x01\x02"), "not a string"),
        (frame_of(b"\xd6\xff\x00\x00\x00\x00"), "datetime"),
        (frame_of(b"\xd4\x02\x00"), "unknown extension 2"),
        (frame_of(b"\xd4\x01\x00"), "tensor does not decode"),
        (tensor_frame("object", [1], 0, 8), "dtype 'object'"),
        (tensor_frame("float32", [33], 0, 132), "out of bounds"),
        (tensor_frame("float32", [4], 128, 16), "out of bounds"),
        (tensor_frame("float32", [4], 4, 16), "unaligned"),
        (tensor_frame("float32", [4], -64, 16), "out of bounds"),
        (tensor_frame("float32", [4], 0, 12), "does not take 12 bytes"),
        (tensor_frame("float32", [-2, -2], 0, 16), "dimensions"),
        (tensor_frame("float32", [1] * 9, 0, 4), "dimensions"),
        (tensor_frame("float32", [0, 2**62], 0, 0), "shape"),
        (tensor_frame("bool", [2], 0, 2, b"\x01\x02" + bytes(62)), "0 and 1"),
        (memoryview(bytes(128))[::2], "contiguous"),
    ],
)
def test_decoding_says_why_it_refuses(data: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        decode_frame(data)


def test_frame_error_is_a_protocol_error_and_pickles() -> None:
    error = pickle.loads(pickle.dumps(FrameError("x")))
    assert isinstance(error, ProtocolError)
    assert str(error) == "x"


def test_many_tensors_at_an_odd_address_are_copied_once() -> None:
    claim = msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("uint8", (1 << 16,), 0, 1 << 16)))
    data = b"\0" + frame_of(msgspec.msgpack.encode([claim] * 1000), bytes(1 << 16))
    arrays = decode_frame(memoryview(data)[1:])
    assert len(arrays) == 1000
    assert np.shares_memory(arrays[0], arrays[-1])
