"""Whole tensors in safetensors files: written one after another, read whole or in slices."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from penstock.services.trainer.checkpoint.store import StoredFile
from penstock.shared.errors import CheckpointError

__all__ = [
    "TensorTable",
    "describe_tensors",
    "read_slices",
    "read_tensors",
    "table_of",
    "tensor_table",
    "write_tensors",
]

TensorTable = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
"""(name, shape, dtype) of whole tensors in storage order."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def table_of(tensors: Mapping[str, Tensor]) -> TensorTable:
    """Return the name, shape and dtype of each tensor in ``tensors``."""
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def write_tensors(path: Path, table: TensorTable, tensors: Iterable[Tensor]) -> StoredFile:
    """Write a safetensors file and fsync it. Only one of ``tensors`` has to exist at a time.

    Args:
        table: names, shapes and types, which determine the header before the first tensor exists.
        tensors: in the order of ``table``.

    Raises:
        OSError: the disk refuses a write.
    """
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _pieces(table, tensors):
            file.write(piece)
            hasher.update(piece)
        file.flush()
        os.fsync(file.fileno())
        return StoredFile(file.tell(), hasher.hexdigest())


def describe_tensors(table: TensorTable, tensors: Iterable[Tensor]) -> StoredFile:
    """Return size and hash of the file that ``write_tensors`` would write."""
    hasher, nbytes = hashlib.sha256(), 0
    for piece in _pieces(table, tensors):
        hasher.update(piece)
        nbytes += len(piece)
    return StoredFile(nbytes, hasher.hexdigest())


def _pieces(table: TensorTable, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, one tensor after another."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in table:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for (name, shape, dtype), tensor in zip(table, tensors, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
        if tensor.numel():  # an empty tensor has no stride that could be viewed as bytes
            yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file. Raises CheckpointError."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return tensors


def tensor_table(path: Path) -> TensorTable:
    """Return the name, shape and dtype of each tensor in a file, without reading the tensors. Raises
    CheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return [(name, tuple(part.get_shape()), _DTYPES[part.get_dtype()]) for name, part in slices.items()]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_slices(path: Path, targets: Mapping[str, Tensor], rows_of: Callable[[int], slice]) -> None:
    """Copy rows of stored tensors into ``targets``, by name. ``rows_of(n)`` returns the slice of rows to copy from a
    stored tensor with n rows. Scalars are copied whole.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name, target in targets.items():
                stored = file.get_slice(name)
                shape = stored.get_shape()
                part = stored[rows_of(shape[0])] if shape else file.get_tensor(name)
                target.copy_(part)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
