"""Tensors in one flat buffer, arranged by a layout: filling, viewing, hashing."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.errors import UnreadableWeights, WeightsError
from penstock.shared.protocol.weights import ALIGN, Layout, TensorSpec, make_layout

__all__ = ["bytes_of", "check_layout", "digest_of", "digest_of_tensors", "fill", "layout_of", "place", "view"]

_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK_BYTES = 256 << 10
"""Number of bytes that are copied and then hashed at a time: few enough to stay in the cache in between."""
_BESIDE_BYTES = 8 << 20
"""Size up to which copying a tensor or buffer is not worth a second thread (bytes)."""
_PIECE_BYTES = 2 << 20
"""Bytes that a thread copies at a time."""
_MAX_HELPERS = 3
_KEEP = 5
"""A single helper thread copies all pieces but every ``_KEEP``-th. The caller copies these and hashes all pieces, so
that helper and caller finish at about the same time."""


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
    """Return the layout of named tensors, in their order.

    Raises:
        WeightsError: an unsupported dtype, or a duplicate name.
    """
    table = []
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise WeightsError(f"'{name}' is {tensor.dtype}; weights may be {', '.join(_DTYPES)}")
        table.append((name, _NAMES[tensor.dtype], tuple(tensor.shape)))
    if len({name for name, _, _ in table}) < len(table):
        raise WeightsError("two tensors have the same name")
    return make_layout(table)


def check_layout(layout: Layout, expected: Layout | None) -> Layout:
    """Check that a layout is safe to index memory with, and return it.

    Raises:
        UnreadableWeights: it differs from ``expected``, or its table is inconsistent.
    """
    if expected is not None:
        if layout.id != expected.id or layout.nbytes != expected.nbytes:
            raise UnreadableWeights(
                f"layout {layout.id} ({len(layout.tensors)} tensors, {layout.nbytes} bytes) is not this engine's "
                f"{expected.id} ({len(expected.tensors)} tensors, {expected.nbytes} bytes): another model or dtype"
            )
        return expected
    try:
        derived = make_layout((spec.name, spec.dtype, spec.shape) for spec in layout.tensors)
    except KeyError as error:
        raise UnreadableWeights(f"layout {layout.id} has a tensor of unknown dtype {error}") from None
    if derived != layout or any(size < 0 for spec in layout.tensors for size in spec.shape):
        raise UnreadableWeights(f"layout {layout.id} contradicts itself")
    return derived


def view(buffer: NDArray[np.uint8] | Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return zero-copy tensors of ``buffer``, uint8 [layout.nbytes]; the tensors keep the buffer alive."""
    flat = buffer if isinstance(buffer, Tensor) else torch.from_numpy(buffer)
    return {
        spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(_DTYPES[spec.dtype]).view(spec.shape)
        for spec in layout.tensors
    }


def digest_of(buffer: NDArray[np.uint8]) -> str:
    """Return the xxh3-128 of the buffer, in hex."""
    return str(xxhash.xxh3_128_hexdigest(buffer.data))


def digest_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest that ``fill`` would compute for ``tensors`` in this order, without copying them to a buffer."""
    hasher = xxhash.xxh3_128()
    for _, tensor in tensors:
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        hasher.update(data.data)
        hasher.update(bytes(-data.nbytes % ALIGN))
    return str(hasher.hexdigest())


def fill(buffer: NDArray[np.uint8], layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Copy ``tensors`` (any order, any device) into ``buffer``, uint8 [layout.nbytes], and return its digest.

    Raises:
        WeightsError: a tensor is missing, unknown, given twice, or of another shape or dtype.
    """
    with _Writing(buffer) as writing:
        for spec, tensor in _matched(layout, tensors):
            writing.write(spec, tensor)
        return writing.digest()


def place(flat: Tensor, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy ``tensors`` into ``flat``, uint8 [layout.nbytes] on any device, on the current stream; see ``fill``."""
    for spec, tensor in _matched(layout, tensors):
        end = spec.offset + spec.nbytes
        flat[spec.offset : end].view(tensor.dtype).view(spec.shape).copy_(tensor)
        flat[end : end + -end % ALIGN].zero_()


def _matched(layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield each tensor as ``(its spec in layout, tensor)``. Raises WeightsError if they do not fit the layout."""
    missing = {spec.name: spec for spec in layout.tensors}
    for name, tensor in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            raise WeightsError(f"'{name}' is not in layout {layout.id}, or was given twice")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != _DTYPES[spec.dtype]:
            raise WeightsError(
                f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, its layout says {spec.dtype} {spec.shape}"
            )
        yield spec, tensor.detach()
    if missing:
        first = next(iter(missing))
        raise WeightsError(f"{len(missing)} tensors of layout {layout.id} are missing, first '{first}'")


class _Writing:
    """Writes tensors into a buffer, uint8 [bytes], and at the same time computes the xxh3-128 of the buffer.

    Several threads copy a large tensor in memory piece by piece: the caller hashes in order what is copied, and copies
    the pieces that no helper has taken.
    """

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self._buffer, self._flat, self._hasher = buffer, torch.from_numpy(buffer), xxhash.xxh3_128()
        self._hashed = self._written = 0
        cores = len(os.sched_getaffinity(0)) if buffer.nbytes > _BESIDE_BYTES else 1
        self._num_helpers = min(cores - 1, _MAX_HELPERS)
        self._helpers = ThreadPoolExecutor(self._num_helpers, "weights") if self._num_helpers else None
        self._hashing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._helpers is not None:
            self._helpers.shutdown(cancel_futures=True)

    def write(self, spec: TensorSpec, source: Tensor) -> None:
        """Copy ``source`` to its offset and zero the padding behind it.

        Bytes that are written out of order are hashed only in ``digest``.
        """
        end, in_order = spec.offset + spec.nbytes, spec.offset == self._written
        if source.device.type != "cpu" or not source.is_contiguous():
            self._flat[spec.offset : end].view(source.dtype).view(spec.shape).copy_(source)
        elif in_order and spec.nbytes > _BESIDE_BYTES:
            self._copy_and_hash(bytes_of(source))
        else:
            np.copyto(self._buffer[spec.offset : end], bytes_of(source))
        padded = end + -end % ALIGN
        self._buffer[end:padded] = 0
        if in_order:
            self._written = padded
            self._hash_written()

    def digest(self) -> str:
        """Return the digest of the buffer, once all of it is written."""
        self._hash(self._buffer.nbytes)
        return str(self._hasher.hexdigest())

    def _copy_and_hash(self, data: NDArray[np.uint8]) -> None:
        """Copy ``data``, uint8 [bytes], to the position after the bytes written so far, and hash it."""
        self._hash(self._written)
        target = self._buffer[self._written : self._written + len(data)]
        pieces = [slice(start, min(start + _PIECE_BYTES, len(data))) for start in range(0, len(data), _PIECE_BYTES)]
        copied, free = [threading.Event() for _ in pieces], set(range(len(pieces)))

        def help_out() -> None:
            for number, piece in enumerate(pieces):
                if (number % _KEEP or self._num_helpers > 1) and _take(free, number):
                    try:
                        np.copyto(target[piece], data[piece])
                    finally:
                        copied[number].set()

        helping = [self._helpers.submit(help_out) for _ in range(self._num_helpers)] if self._helpers else []
        for number, piece in enumerate(pieces):
            if not _take(free, number):
                copied[number].wait()
                self._hasher.update(data[piece].data)
                continue
            for start in range(piece.start, piece.stop, _CHUNK_BYTES):
                chunk = slice(start, min(start + _CHUNK_BYTES, piece.stop))
                np.copyto(target[chunk], data[chunk])
                self._hasher.update(data[chunk].data)
        for help_of_one in helping:
            help_of_one.result()
        self._hashed += len(data)

    def _hash_written(self) -> None:
        """Hash the bytes written since the last call if they fill a chunk. A helper thread hashes large amounts while
        the caller copies the next tensor."""
        start, stop = self._hashed, self._written
        if self._helpers is None or stop - start < _BESIDE_BYTES:
            if stop - start >= _CHUNK_BYTES:
                self._hash(stop)
            return
        before, self._hashed = self._hashing, stop

        def hash_next() -> None:
            if before is not None:
                before.result()
            self._hasher.update(self._buffer[start:stop].data)

        self._hashing = self._helpers.submit(hash_next)

    def _hash(self, stop: int) -> None:
        """Hash all bytes before ``stop`` now."""
        if self._hashing is not None:
            self._hashing.result()
            self._hashing = None
        self._hasher.update(self._buffer[self._hashed : stop].data)
        self._hashed = stop


def bytes_of(source: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous tensor, uint8 [bytes], valid while the tensor lives.

    ``Tensor.numpy`` exports the memory, and torch refuses to free exported memory. FSDP must free the tensors that it
    gathered.
    """
    if not source.nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * source.nbytes).from_address(source.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


def _take(free: set[int], number: int) -> bool:
    """Remove ``number`` from the set ``free``; return False if another thread has removed it before."""
    try:
        free.remove(number)  # atomic under the lock of the interpreter
    except KeyError:
        return False
    return True
