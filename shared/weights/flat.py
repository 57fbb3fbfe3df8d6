"""Tensors in one flat buffer, as a layout describes it: filling, viewing, hashing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import ALIGN, Layout, TensorSpec, make_layout

__all__ = ["check_layout", "digest_of", "digest_of_tensors", "fill", "layout_of", "view"]

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
_CHUNK_BYTES = 2 << 20  # stays in a cache, so that hashing what was just copied does not read memory again


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
    """The layout of named tensors, in their order.

    Raises:
        WeightsError: a dtype that weights cannot have, or a name that occurs twice.
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
    """A layout that is safe to index memory with, equal to ``layout``.

    Raises:
        WeightsError: it is not the ``expected`` one, or its table contradicts itself.
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


def view(buffer: NDArray[np.uint8], layout: Layout) -> dict[str, Tensor]:
    """Zero-copy tensors of ``buffer``, uint8 [layout.nbytes]; they keep it alive."""
    flat = torch.from_numpy(buffer)
    return {
        spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(_DTYPES[spec.dtype]).view(spec.shape)
        for spec in layout.tensors
    }


def digest_of(buffer: NDArray[np.uint8]) -> str:
    """xxh3-128 of the buffer, in hex."""
    return str(xxhash.xxh3_128_hexdigest(buffer.data))


def digest_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest that ``fill`` returns for these tensors in this order, without a buffer."""
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
    missing = {spec.name: spec for spec in layout.tensors}
    hasher, hashed = xxhash.xxh3_128(), 0
    flat = torch.from_numpy(buffer)
    for name, tensor in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            raise WeightsError(f"'{name}' is not in layout {layout.id}, or was given twice")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != _DTYPES[spec.dtype]:
            raise WeightsError(
                f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, its layout says {spec.dtype} {spec.shape}"
            )
        end = spec.offset + spec.nbytes
        for start, stop in _copy(flat, spec, tensor.detach()):
            if hashed == start:
                hasher.update(buffer[start:stop].data)
                hashed = stop
        padding = buffer[end : end + -end % ALIGN]
        padding[:] = 0
        if hashed == end:
            hasher.update(padding.data)
            hashed += len(padding)
    if missing:
        raise WeightsError(f"{len(missing)} tensors of layout {layout.id} are missing, first '{next(iter(missing))}'")
    return str(hasher.hexdigest()) if hashed == layout.nbytes else digest_of(buffer)


def _copy(flat: Tensor, spec: TensorSpec, source: Tensor) -> Iterator[tuple[int, int]]:
    """Copy one tensor to its place; yields each byte range once it is written."""
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
