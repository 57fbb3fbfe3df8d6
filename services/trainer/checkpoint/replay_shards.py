"""The columns of a replay buffer in a checkpoint: files of so many rows each, of which only new ones are written.

A buffer changes where rows are inserted and nowhere else. A shard whose bytes are those of the same shard in the newest
checkpoint of the job becomes a second name (a hard link) of that file. So a checkpoint is complete by itself, its
digest does not depend on what was written before, and deleting another one takes nothing from it.

Shape legend: K = rows that are kept, ... the shape of one entry.
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
"""A shard has as many rows as fit: what one inserted row costs a checkpoint at most, for each place of insertion."""
_FOLDER = "replay"


def write_shards_of_rows(
    directory: Path, columns: Mapping[str, Tensor], previous: StoredCheckpoint | None
) -> dict[str, StoredFile]:
    """Write columns [K, ...] of equally many rows, or link what ``previous`` has of them; returns all files.

    Raises:
        OSError: the disk does not take it.
    """
    files: dict[str, StoredFile] = {}
    for number, shard in enumerate(_shards(columns)):
        name = f"{_FOLDER}/{number:05d}.safetensors"
        path, table = directory / name, table_of(shard)
        path.parent.mkdir(exist_ok=True)
        known = None if previous is None else previous.manifest.files.get(name)
        if previous is not None and known is not None and known == describe_tensors(table, shard.values()):
            with contextlib.suppress(OSError):  # no links on this file system, or too many: it is written
                os.link(previous.path / name, path)
                files[name] = known
                continue
            path.unlink(missing_ok=True)
        files[name] = write_tensors(path, table, shard.values())
    return files


def read_shards_of_rows(path: Path, manifest: CheckpointManifest) -> dict[str, Tensor]:
    """The columns in a checkpoint; none where it has no shards.

    Raises:
        CheckpointError: a shard cannot be read, or they do not fit together.
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
    """Slices of the columns by rows; one without rows where there are none."""
    if not columns:
        return
    num_rows = len(next(iter(columns.values())))
    assert all(len(column) == num_rows for column in columns.values()), "columns of one buffer"
    row_bytes = sum(column[:1].nbytes for column in columns.values())
    rows = max(1, SHARD_BYTES // max(1, row_bytes))
    for start in range(0, max(1, num_rows), rows):
        yield {name: column[start : start + rows] for name, column in columns.items()}
