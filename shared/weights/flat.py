"""Tensors in one flat buffer, arranged by a layout: filling, viewing, hashing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import ALIGN, Layout, TensorSpec, make_layout

__all__ = ["check_layout", "digest_of", "digest_of_tensors", "fill", "layout_of", "place", "view"]

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
_CHUNK_BYTES = 2 << 20  # fits into a cache, so that hashing after copying does not read memory again
_BESIDE_BYTES = 8 << 20  # bytes hashed per step by a separate thread; smaller buffers are not worth a thread


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
        WeightsError: it differs from ``expected``, or its table is inconsistent.
    """
    if expected is not None:
        if layout.id != expected.id or layout.nbytes != expected.nbytes:
            raise WeightsError(
                f"layout {layout.id} ({len(layout.tensors)} tensors, {layout.nbytes} bytes) is not this engine's "
                f"{expected.id} ({len(expected.tensors)} tensors, {expected.nbytes} bytes): another model or dtype"
            )
        return expected
    try:
        derived = make_layout((spec.name, spec.dtype, spec.shape) for spec in layout.tensors)
    except KeyError as error:
        raise WeightsError(f"layout {layout.id} has a tensor of unknown dtype {error}") from None
    if derived != layout or any(size < 0 for spec in layout.tensors for size in spec.shape):
        raise WeightsError(f"layout {layout.id} contradicts itself")
    return derived


def view(buffer: NDArray[np.uint8] | Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return zero-copy tensors of ``buffer``, uint8 [layout.nbytes]; they keep it alive."""
    flat = buffer if isinstance(buffer, Tensor) else torch.from_numpy(buffer)
    return {
        spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(_DTYPES[spec.dtype]).view(spec.shape)
        for spec in layout.tensors
    }


def digest_of(buffer: NDArray[np.uint8]) -> str:
    """Return the xxh3-128 of the buffer, in hex."""
    return str(xxhash.xxh3_128_hexdigest(buffer.data))


def digest_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest that ``fill`` computes for these tensors in this order, without a buffer."""
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
    flat = torch.from_numpy(buffer)
    with _Hashing(buffer) as hashing:
        for spec, tensor in _matched(layout, tensors):
            end = spec.offset + spec.nbytes
            for start, stop in _copy(flat, spec, tensor):
                hashing.written(start, stop)
            buffer[end : end + -end % ALIGN] = 0
            hashing.written(end, end + -end % ALIGN)
        return hashing.digest()


def place(flat: Tensor, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy ``tensors`` into ``flat``, uint8 [layout.nbytes] on any device, on the current stream; see ``fill``."""
    for spec, tensor in _matched(layout, tensors):
        end = spec.offset + spec.nbytes
        flat[spec.offset : end].view(tensor.dtype).view(spec.shape).copy_(tensor)
        flat[end : end + -end % ALIGN].zero_()


def _matched(layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield each tensor with its place. Raises WeightsError as ``fill``."""
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


class _Hashing:
    """Computes the xxh3-128 of a buffer while it is being written; for large buffers in a separate thread.

    Args:
        buffer: uint8 [bytes].
    """

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self._buffer, self._hasher = buffer, xxhash.xxh3_128()
        self._hashed = self._written = 0
        self._thread = ThreadPoolExecutor(1, "weights-hash") if buffer.nbytes > _BESIDE_BYTES else None
        self._pieces: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def written(self, start: int, stop: int) -> None:
        """Mark bytes [start, stop) as written. Out-of-order ranges are hashed at the end."""
        if start == self._written:
            self._written = stop
        if self._written - self._hashed >= (_BESIDE_BYTES if self._thread else 1):
            self._hash(self._written)

    def digest(self) -> str:
        """Return the digest of the buffer, once all of it is written."""
        self._hash(self._buffer.nbytes)
        for piece in self._pieces:
            piece.result()
        return str(self._hasher.hexdigest())

    def _hash(self, stop: int) -> None:
        data, self._hashed = self._buffer[self._hashed : stop].data, stop
        if self._thread is None:
            self._hasher.update(data)
        else:
            self._pieces.append(self._thread.submit(self._hasher.update, data))


def _copy(flat: Tensor, spec: TensorSpec, source: Tensor) -> Iterator[tuple[int, int]]:
    """Copy one tensor to its place; yield each byte range once it is written."""
    target = flat[spec.offset : spec.offset + spec.nbytes].view(source.dtype)
    if source.device.type != "cpu" or not source.is_contiguous():
        target.view(spec.shape).copy_(source)
        yield spec.offset, spec.offset + spec.nbytes
        return
    elements, size = source.view(-1), source.element_size()
    step = _CHUNK_BYTES // size
    for start in range(0, len(elements), step):
        stop = min(start + step, len(elements))
        target[start:stop].copy_(elements[start:stop])
        yield spec.offset + start * size, spec.offset + stop * size
