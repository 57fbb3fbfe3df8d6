"""Frame: one format for tensors inline in a message, in shared memory, over TCP and on disk.

::

    b"PSF1" | u32 header bytes (little endian) | msgpack header | zeros to 64 | blob | zeros to 64 | blob ...

The header is the user's tree with every tensor replaced by a msgpack extension ``(dtype, shape, offset, nbytes)``;
offsets count from the first blob and are multiples of 64. A tensor is an extension, not a dict with a reserved key, so
user data cannot be mistaken for one. Numbers are little endian.

Decoding trusts no input: sizes, offsets, dtypes, dimensions and nesting are checked before an array is made, and
allocations are bounded by the size of the buffer. There is no pickle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import FrameError

__all__ = [
    "BLOB_ALIGN",
    "MAX_DEPTH",
    "MAX_DIMS",
    "MAX_HEADER_BYTES",
    "BFloat16",
    "Buffer",
    "decode_frame",
    "encode_frame",
    "is_frame",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Buffer to which a frame is written, or from which a frame is read."""

MAGIC = b"PSF1"
BLOB_ALIGN = 64
"""Alignment of blobs from the start of the frame (bytes)."""
MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 8
MAX_DEPTH = 32
"""Deepest nesting of lists and dicts in a tree."""

_PREFIX = struct.Struct("<4sI")
_TENSOR = 1  # extension code
_BFLOAT16 = "bfloat16"
_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bool"),
    *("int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8"),
)
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _DTYPE_NAMES}
_NAMES = {np.dtype(name): name for name in _DTYPE_NAMES}
"""Names of dtypes, cached because NumPy builds the name on every access."""
_MAX_ITEM_BYTES = 8
_SMALL_BYTES = 2048
"""Largest array that is copied while it is encoded, which takes less time than a view of it."""
_LEAVES = frozenset({type(None), str, bytes, bool, int, float, np.ndarray})
"""Types without children in a decoded tree."""
_KEYS = frozenset({str})
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the second one for text that is not UTF-8


@dataclass(frozen=True, slots=True, eq=False)
class BFloat16:
    """A bfloat16 tensor, which NumPy cannot name: ``bits`` is uint16 with the upper halves of the float32 values."""

    bits: NDArray[np.uint16]


class _Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


_tensors = msgspec.msgpack.Decoder(_Tensor)


def is_frame(data: Buffer) -> bool:
    """Return True if the bytes begin like a frame; an envelope never does."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def encode_frame(tree: Any) -> list[Buffer]:
    """Encode ``tree`` as a list of buffers, to be joined or written one after another; large arrays are not copied.

    A tree is made of dicts with string keys, lists, tuples (decoded as lists), str, bytes, bool, int (64 bits), float,
    None, NumPy scalars (decoded as Python's), NumPy arrays and ``BFloat16``. The buffers alias its arrays: send them
    before the arrays change.

    Raises:
        FrameError: the tree holds something else, is nested too deep, or its header is too large.
    """
    blobs: list[Buffer] = []
    try:
        header = msgspec.msgpack.encode(_Encoder(blobs).walk(tree, 0))
    except (OverflowError, UnicodeError) as error:
        raise FrameError(f"tree does not encode: {error}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"header of {len(header)} bytes is above {MAX_HEADER_BYTES}; put large text into uint8 arrays")
    prefix = _PREFIX.pack(MAGIC, len(header)) + header
    return [prefix + bytes(-len(prefix) % BLOB_ALIGN), *blobs]


class _Encoder:
    """Replaces each array of a tree by a msgpack extension that describes it, and collects the bytes of the arrays."""

    def __init__(self, blobs: list[Buffer]) -> None:
        self._blobs = blobs
        self._offset = 0

    def walk(self, node: Any, depth: int) -> Any:
        if isinstance(node, np.ndarray):
            return self._tensor(node, _NAMES.get(node.dtype) or node.dtype.name)
        if node is None or isinstance(node, str | bytes | bool | int | float):
            return node.item() if isinstance(node, np.generic) else node
        if isinstance(node, dict | list | tuple):
            if depth == MAX_DEPTH:
                raise FrameError(f"tree is nested deeper than {MAX_DEPTH}")
            if not isinstance(node, dict):
                return [child if type(child) is str else self.walk(child, depth + 1) for child in node]
            if not all(isinstance(key, str) for key in node):
                raise FrameError("keys of a dict must be strings")
            return {key: self.walk(child, depth + 1) for key, child in node.items()}
        if isinstance(node, BFloat16):
            if node.bits.dtype != np.uint16:
                raise FrameError(f"the bits of a BFloat16 must be uint16, not {node.bits.dtype}")
            return self._tensor(node.bits, _BFLOAT16)
        if isinstance(node, np.generic) and node.dtype.name in _DTYPES:
            return node.item()
        raise FrameError(f"a frame cannot hold a {type(node).__name__}")

    def _tensor(self, array: NDArray[Any], dtype: str) -> msgspec.msgpack.Ext:
        stored = _DTYPES["uint16"] if dtype == _BFLOAT16 else _DTYPES.get(dtype)
        if stored is None:
            raise FrameError(f"dtype {array.dtype} is not allowed in a frame")
        if array.ndim > MAX_DIMS:
            raise FrameError(f"array has {array.ndim} dimensions, more than {MAX_DIMS}")
        # asarray, not ascontiguousarray: that one turns 0-d arrays into 1-d ones.
        flat = np.asarray(array, dtype=stored, order="C")
        nbytes, start = flat.nbytes, self._offset
        padding = -nbytes % BLOB_ALIGN
        if nbytes > _SMALL_BYTES:
            self._blobs.append(flat.reshape(-1).view(np.uint8).data)
            self._blobs.append(bytes(padding))
        elif nbytes:
            self._blobs.append(flat.tobytes() + bytes(padding))
        self._offset += nbytes + padding
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(_Tensor(dtype, array.shape, start, nbytes)))


def decode_frame(data: Buffer) -> Any:
    """Inverse of ``encode_frame``. Arrays are views of ``data``: they keep ``data`` alive, and are read-only if
    ``data`` is read-only.

    If the blobs do not begin at a multiple of 8 bytes in memory, they are copied once so that every array is aligned.

    Raises:
        FrameError: ``data`` is not a frame, is truncated, or has values out of bounds.
    """
    try:
        buffer = memoryview(data).cast("B")
    except TypeError as error:
        raise FrameError(f"not a contiguous buffer: {error}") from None
    if len(buffer) < _PREFIX.size:
        raise FrameError(f"{len(buffer)} bytes are too short for a frame")
    magic, header_bytes = _PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise FrameError("not a frame: wrong magic")
    end = _PREFIX.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or end > len(buffer):
        raise FrameError(f"header of {header_bytes} bytes does not fit into a frame of {len(buffer)}")
    decoder = msgspec.msgpack.Decoder(ext_hook=_Blobs(buffer[end + -end % BLOB_ALIGN :]))
    try:
        tree = decoder.decode(buffer[_PREFIX.size : end])
    except _UNDECODABLE as error:
        raise FrameError(f"header does not decode: {error}") from None
    _check_tree(tree)
    return tree


def _check_tree(tree: Any) -> None:
    """Raise FrameError for anything that ``encode_frame`` never writes (other keys, timestamps, deep nesting)."""
    level, depth = [tree], 0
    while level:
        below: list[Any] = []
        for node in level:
            if type(node) in _LEAVES:
                continue
            if isinstance(node, dict):
                if not _KEYS.issuperset(map(type, node)):
                    raise FrameError("header has a key that is not a string")
                below.extend(node.values())
            elif isinstance(node, list):
                if not _LEAVES.issuperset(map(type, node)):  # long lists of texts are common
                    below.extend(node)
            elif not isinstance(node, BFloat16):
                raise FrameError(f"header holds a {type(node).__name__}")
        level, depth = below, depth + 1
        if level and depth > MAX_DEPTH:
            raise FrameError(f"header is nested deeper than {MAX_DEPTH}")


class _Blobs:
    """Converts each tensor extension to an array; called by the msgpack decoder."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        if len(body) and np.frombuffer(body, np.uint8).__array_interface__["data"][0] % _MAX_ITEM_BYTES:
            self._body = np.frombuffer(body, np.uint8).copy().data

    def __call__(self, code: int, data: memoryview) -> NDArray[Any] | BFloat16:
        if code != _TENSOR:
            raise FrameError(f"unknown extension {code} in the header")
        try:
            tensor = _tensors.decode(data)
        except _UNDECODABLE as error:
            raise FrameError(f"tensor does not decode: {error}") from None
        if tensor.dtype == _BFLOAT16:
            return BFloat16(self._array(tensor, _DTYPES["uint16"]))
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise FrameError(f"dtype '{tensor.dtype[:40]}' is not allowed in a frame")
        return self._array(tensor, dtype)

    def _array(self, tensor: _Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
        shape, offset, nbytes = tensor.shape, tensor.offset, tensor.nbytes
        if len(shape) > MAX_DIMS or min(shape, default=0) < 0:
            raise FrameError(
                f"shape {shape[: MAX_DIMS + 1]} is not allowed: at most {MAX_DIMS} dimensions, none negative"
            )
        if prod(shape) * dtype.itemsize != nbytes:
            raise FrameError(f"shape {shape} of {dtype} does not take {nbytes} bytes")
        if offset < 0 or offset % BLOB_ALIGN or offset + nbytes > len(self._body):
            raise FrameError(
                f"blob [{offset}, {offset + nbytes}) is out of bounds or unaligned, body {len(self._body)} bytes"
            )
        try:
            if not nbytes:
                return np.empty(shape, dtype)
            array: NDArray[Any] = np.ndarray(shape, dtype, self._body, offset)
        except (ValueError, OverflowError) as error:  # e.g. (0, 2**62): no elements, yet not a shape for NumPy
            raise FrameError(f"shape {shape}: {error}") from None
        if dtype.kind == "b" and not _are_bools(array):
            raise FrameError("a bool array holds bytes other than 0 and 1")
        return array


def _are_bools(array: NDArray[np.bool_]) -> bool:
    """Return True if each byte is 0 or 1. Works on bytes, which is faster than NumPy for small arrays."""
    if array.nbytes <= _SMALL_BYTES:
        return not array.tobytes().strip(b"\0\1")
    return bool(array.view(np.uint8).max() <= 1)
