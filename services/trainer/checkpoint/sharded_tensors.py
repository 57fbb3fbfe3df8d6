"""Tensors sharded over ranks, in the file format of torch's distributed checkpoint (DCP).

Every rank writes its own parts; any number of ranks, or a single process, reads the parts it needs. The format has one
pickle, the table `.metadata`; a restricted unpickler reads it and knows only the types of that table.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.services.trainer.checkpoint.whole_tensors import TensorTable
from penstock.shared.errors import CheckpointError

__all__ = ["METADATA", "own_files", "read_shards", "shard_table", "write_shards"]

METADATA = ".metadata"
_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_KNOWN_NAMES = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILESYSTEM, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # in Python 3.13
}


def write_shards(directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's parts of DTensors, and each whole tensor on only one rank. The files are durable on return.

    A collective of ``group``, whose ranks all pass the same names.

    Args:
        group: process group of the ranks, which nothing else uses meanwhile; None: a single process.

    Raises:
        CheckpointError: a rank could not write.
    """
    writer = FileSystemWriter(directory, sync_files=True)
    try:
        with _quiet():
            save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"cannot write the parts of checkpoint {directory.parent}: {_reason(error)}") from error


def read_shards(directory: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill ``targets``, whole tensors or this rank's parts of DTensors, with the stored tensors. Not a collective.

    Raises:
        CheckpointError: a name is missing, a shape differs, or a file cannot be read.
    """
    try:
        with _quiet():
            load(dict(targets), storage_reader=_Reader(directory), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{directory} cannot be read: {_reason(error)}") from error


def shard_table(directory: Path) -> TensorTable:
    """Return names, whole shapes and types of the stored tensors.

    Raises:
        CheckpointError: the table cannot be read.
    """
    try:
        stored = _Reader(directory).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointError(f"{directory / METADATA} cannot be read: {error}") from None
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    return [(name, tuple(entry.size), entry.properties.dtype) for name, entry in sorted(tensors.items())]


def own_files(directory: Path, rank: int) -> list[Path]:
    """Return the files that ``rank`` wrote."""
    mine = sorted(directory.glob(f"__{rank}_*"))
    return [*mine, directory / METADATA] if rank == 0 else mine


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self.path, METADATA).open("rb") as file:
            metadata: Metadata = _TableUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _KNOWN_NAMES or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"'{module}.{name}' has no place in a table of tensors")


def _member(kind: Any, name: Any) -> Enum:
    """Replaces ``getattr`` in pickles of some Python 3.11 releases: returns members of enumerations, refuses other
    uses."""
    if not (isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError("'builtins.getattr' has no place in a table of tensors but for enumerations")
    member: Enum = kind.__members__[name]
    return member


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warning about reading or writing in one process, which is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: BaseException) -> str:
    causes = getattr(error, "failures", None)
    first = next(iter(causes.values()))[0] if causes else error
    return str(first).strip().split("\n", 1)[0]
