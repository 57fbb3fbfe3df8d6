"""Messages between the ranks of a checkpoint: the files that each of them wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from penstock.services.trainer.checkpoint_store import StoredFile, describe_file
from penstock.shared.errors import CheckpointError

__all__ = ["CheckpointRanks", "agree", "gathered_files"]


class CheckpointRanks(Protocol):
    """The ranks that write a checkpoint together. Apart from those that train, for both go on at once."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def handle(self) -> dist.ProcessGroup:
        """For torch's own collectives."""

    def gather(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """See ``Collective``."""


class _Written(msgspec.Struct, frozen=True):
    files: dict[str, StoredFile]
    error: str = ""


def agree(error: str, ranks: CheckpointRanks | None) -> None:
    """Tell the other ranks what keeps this one from writing, "" for nothing. All ranks call this.

    Raises:
        CheckpointError: some rank cannot write; on every rank.
    """
    errors = [error]
    if ranks is not None:
        parts = ranks.gather({"error": np.frombuffer(error.encode(), np.uint8)})
        errors = [part["error"].tobytes().decode() for part in parts]
    for rank, text in enumerate(errors):
        if text:
            raise CheckpointError(f"rank {rank} cannot begin a checkpoint: {text}")


def gathered_files(partial: Path, own: Sequence[str], ranks: CheckpointRanks | None) -> dict[str, StoredFile]:
    """Sizes and hashes of the files of all ranks, of which this one wrote ``own``.

    Raises:
        CheckpointError: a rank cannot read what it wrote; on every rank.
    """
    try:
        written = _Written({name: describe_file(partial / name) for name in own})
    except OSError as error:
        written = _Written({}, str(error))
    everybody = [written]
    if ranks is not None:
        data = np.frombuffer(msgspec.msgpack.encode(written), np.uint8)
        parts = ranks.gather({"written": data})
        everybody = [msgspec.msgpack.decode(part["written"].tobytes(), type=_Written) for part in parts]
    for rank, each in enumerate(everybody):
        if each.error:
            raise CheckpointError(f"rank {rank} cannot write its part of {partial}: {each.error}")
    return {name: file for each in everybody for name, file in each.files.items()}
