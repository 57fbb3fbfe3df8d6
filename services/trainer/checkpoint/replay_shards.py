"""Replay buffer columns in a checkpoint: files of a fixed number of rows; only files with changed rows are written.

A buffer changes only where rows are inserted. If a shard has the same bytes as in the job's newest checkpoint, it
becomes a hard link to that file. Thus every checkpoint is complete, its digest does not depend on earlier checkpoints,
and deleting another checkpoint removes nothing from it.

Shape legend: K = stored rows, ... = the shape of one entry.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.services.trainer.checkpoint.store import CheckpointManifest, StoredCheckpoint, StoredFile
from penstock.services.trainer.checkpoint.whole_tensors import describe_tensors, read_tensors, table_of, write_tensors
from penstock.shared.errors import CheckpointError

__all__ = ["read_shards_of_rows", "write_shards_of_rows"]

SHARD_BYTES = 16 << 20
"""Size limit that determines the rows per shard. A checkpoint writes every shard with a changed row anew."""
_FOLDER = "replay"


def write_shards_of_rows(
    directory: Path, columns: Mapping[str, Tensor], previous: StoredCheckpoint | None
) -> dict[str, StoredFile]:
    """Write columns [K, ...] of equal length in shards; return all files by name.

    A shard that is the same in the checkpoint ``previous`` becomes a hard link to the file there.

    Raises:
        OSError: the disk refuses a write.
    """
    files: dict[str, StoredFile] = {}
    for number, shard in enumerate(_shards(columns)):
        name = f"{_FOLDER}/{number:05d}.safetensors"
        path, table = directory / name, table_of(shard)
        path.parent.mkdir(exist_ok=True)
        known = None if previous is None else previous.manifest.files.get(name)
        if previous is not None and known is not None and known == describe_tensors(table, shard.values()):
            with contextlib.suppress(OSError):  # no links on this file system, or too many: write the file
                os.link(previous.path / name, path)
                files[name] = known
                continue
            path.unlink(missing_ok=True)
        files[name] = write_tensors(path, table, shard.values())
    return files


def read_shards_of_rows(path: Path, manifest: CheckpointManifest) -> dict[str, Tensor]:
    """Return the columns in a checkpoint; empty if it has no shards.

    Raises:
        CheckpointError: a shard cannot be read, or shards do not fit together.
    """
    names = sorted(name for name in manifest.files if name.startswith(f"{_FOLDER}/"))
    shards = [read_tensors(path / name) for name in names]
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise CheckpointError(f"{path / _FOLDER}: the shards have other columns than each other")
    try:
        return {name: torch.cat([shard[name] for shard in shards]) for name in (shards[0] if shards else ())}
    except RuntimeError as error:
        raise CheckpointError(f"{path / _FOLDER}: the shards do not fit together: {error}") from None


def _shards(columns: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield slices of rows of the columns: one empty slice if the columns have no rows, no slice if there are no
    columns."""
    if not columns:
        return
    num_rows = len(next(iter(columns.values())))
    assert all(len(column) == num_rows for column in columns.values()), "columns of one buffer"
    row_bytes = sum(column[:1].nbytes for column in columns.values())
    rows = max(1, SHARD_BYTES // max(1, row_bytes))
    for start in range(0, max(1, num_rows), rows):
        yield {name: column[start : start + rows] for name, column in columns.items()}
