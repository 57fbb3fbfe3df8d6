"""Contents of a learner's checkpoint, written and read by any number of ranks.

::

    model.safetensors  config.json  tokenizer.json ...             the policy, loadable with from_pretrained
    adapter_model.safetensors  adapter_config.json                 a low-rank adapter, if any
    optimizer.safetensors  reference.safetensors                   moments and reference that a process holds whole
    shards/                                                        sharded weights, moments and reference (DCP)
    rng.safetensors  rule.safetensors                              random generators, state of the update rule
    replay/00000.safetensors ...                                   rows of a replay buffer (``replay_shards``)
    critic/...                                                     the critic, in the same files
    manifest.json  COMMIT                                          see ``store``

For an embodied job, ``model.safetensors`` and ``config.json`` hold its own policy, not a transformers model; everything
else is in ``rule.safetensors`` and ``replay``.

All tensors have the names of the Hugging Face model, so any backend with any number of ranks reads the checkpoint of
any other. Loading runs no code from the files.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.services.trainer.backends.base import BackendState, LearnerState, Role
from penstock.services.trainer.checkpoint.replay_shards import read_shards_of_rows, write_shards_of_rows
from penstock.services.trainer.checkpoint.store import (
    CheckpointManifest,
    StoredCheckpoint,
    StoredFile,
    commit,
    describe_file,
    list_checkpoints,
    partial_directory,
    read_manifest,
    remove_partial,
    retain,
    sync_directory,
    verify_files,
    write_bytes,
)
from penstock.services.trainer.checkpoint.whole_tensors import (
    TensorTable,
    read_slices,
    read_tensors,
    table_of,
    tensor_table,
    write_tensors,
)
from penstock.services.trainer.optimizer import check_fits
from penstock.services.trainer.ranks.row_shards import is_sharded, local_part, rows_of_mesh
from penstock.shared.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointRanks",
    "agree",
    "gathered_files",
    "help_save",
    "list_checkpoints",
    "load_checkpoint",
    "read_manifest",
    "retain",
    "save_checkpoint",
    "verify_share",
]


class CheckpointRanks(Protocol):
    """The ranks that write a checkpoint together; a separate group from training, because both run at once."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def handle(self) -> dist.ProcessGroup:
        """Return the process group for ``torch.distributed`` collectives."""

    def gather(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """Return the arrays of every rank, in rank order; see ``Collective``."""


class _Written(msgspec.Struct, frozen=True):
    files: dict[str, StoredFile]
    error: str = ""


def agree(error: str, ranks: CheckpointRanks | None) -> None:
    """Share this rank's error ("" for none) with all ranks. All ranks must call this function.

    Raises:
        CheckpointError: some rank cannot write; raised on every rank.
    """
    errors = [error]
    if ranks is not None:
        parts = ranks.gather({"error": np.frombuffer(error.encode(), np.uint8)})
        errors = [part["error"].tobytes().decode() for part in parts]
    for rank, text in enumerate(errors):
        if text:
            raise CheckpointError(f"rank {rank} cannot begin a checkpoint: {text}")


def gathered_files(partial: Path, own: Sequence[str], ranks: CheckpointRanks | None) -> dict[str, StoredFile]:
    """Return sizes and hashes of the files of all ranks by name; ``own`` names the files that this rank wrote.

    Raises:
        CheckpointError: a rank cannot read its own files; raised on every rank.
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


Part = Literal["weights", "adapter", "optimizer", "reference"]

_MODELS: dict[Role, str] = {"policy": "", "critic": "critic/"}
"""Directory of each model's files in a checkpoint."""
_FILES: dict[Part, str] = {
    "weights": "model.safetensors",
    "adapter": "adapter_model.safetensors",
    "optimizer": "optimizer.safetensors",
    "reference": "reference.safetensors",
}
_WHAT: dict[Part, str] = {
    "weights": "checkpoint",
    "adapter": "adapter",
    "optimizer": "optimizer state",
    "reference": "reference policy",
}
_EXPORTED: tuple[Part, ...] = ("weights", "adapter")
"""Parts of a model that other programs read. Each is written as one whole file, even if it is also in shards."""
_SHARDS, _RNG, _RULE = "shards", "rng.safetensors", "rule.safetensors"
_EXPORT_BYTES = 1 << 28
"""Approximate number of bytes of sharded tensors that are joined at once to write the files of ``_EXPORTED``."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint in memory, with verified bytes."""

    stored: StoredCheckpoint
    state: LearnerState

    @property
    def number(self) -> int:
        """Number of the last batch that was trained before the checkpoint; 0 before the first."""
        return self.stored.manifest.number

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata that the caller of ``save_checkpoint`` passed."""
        return self.stored.manifest.meta


# -- write -----------------------------------------------------------------------------------------------------------


def save_checkpoint(
    root: Path,
    job: str,
    number: int,
    state: LearnerState,
    meta: dict[str, Any],
    *,
    token: str | None = None,
    ranks: CheckpointRanks | None = None,
) -> Path:
    """Write a durable checkpoint.

    With several ranks, rank 0 calls this and the others call ``help_save`` with the same ``root``, ``job``, ``number``
    and ``token``, on a shared file system.

    Args:
        root: directory of all jobs' checkpoints.
        number: number of the last batch in the state, 0 before the first.
        meta: metadata stored with the checkpoint; JSON-serializable.
        token: distinguishes attempts at the same number.

    Returns:
        Directory of the checkpoint; for a language model also loadable with ``from_pretrained``.

    Raises:
        CheckpointError: this or another rank cannot write it (disk full, no permission).
    """
    partial = partial_directory(root, job, number, token or secrets.token_hex(4))
    try:
        agree(_made(partial), ranks)
        files = gathered_files(partial, _write_shards(partial, state, ranks), ranks)
        for role, model in state.models.items():
            files |= _write_whole(partial, _MODELS[role], model)
        files |= _write_rule(partial, state, list_checkpoints(root, job)[-1:] if state.columns else [])
        for directory in sorted({(partial / name).parent for name in files} - {partial}):
            sync_directory(directory)
        environment = state.models["policy"].environment
        return commit(partial, job=job, number=number, meta=meta, environment=environment, files=files)
    except CheckpointError:  # the other ranks failed too and write nothing more
        remove_partial(partial)
        raise
    except OSError as error:
        remove_partial(partial)
        raise CheckpointError(f"cannot write checkpoint {number} of job '{job}' under {root}: {error}") from error


def help_save(root: Path, job: str, number: int, state: LearnerState, *, token: str, ranks: CheckpointRanks) -> None:
    """Write this rank's parts; see ``save_checkpoint``.

    Raises:
        CheckpointError: a rank cannot write.
    """
    partial = partial_directory(root, job, number, token)
    agree("", ranks)
    gathered_files(partial, _write_shards(partial, state, ranks), ranks)


def _made(directory: Path) -> str:
    """Create the directory; return the error as text, '' on success."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return ""


def _write_shards(partial: Path, state: LearnerState, ranks: CheckpointRanks | None) -> list[str]:
    """Write this rank's parts of sharded models; return the paths of the written files, relative to ``partial``."""
    written = []
    for role, model in state.models.items():
        if _is_cut(model):
            from penstock.services.trainer.checkpoint.sharded_tensors import own_files, write_shards

            directory = partial / _MODELS[role] / _SHARDS
            write_shards(directory, _flat(model), None if ranks is None else ranks.handle)
            written += own_files(directory, 0 if ranks is None else ranks.rank)
    return [path.relative_to(partial).as_posix() for path in written]


def _write_whole(partial: Path, prefix: str, model: BackendState) -> dict[str, StoredFile]:
    directory = partial / prefix
    directory.mkdir(exist_ok=True)
    files = {prefix + name: write_bytes(directory / name, data) for name, data in model.files.items()}
    files[prefix + _RNG] = write_tensors(directory / _RNG, table_of(model.rng), model.rng.values())
    cut = _is_cut(model)
    for part, name in _FILES.items():
        tensors: dict[str, Tensor] = getattr(model, part)
        if tensors and (not cut or part in _EXPORTED):
            table = table_of(tensors)
            whole = _put_together(directory / _SHARDS, part, table) if cut else tensors.values()
            files[prefix + name] = write_tensors(directory / name, table, whole)
    return files


def _write_rule(partial: Path, state: LearnerState, previous: Sequence[StoredCheckpoint]) -> dict[str, StoredFile]:
    """Write the state of the update rule; return all files by name.

    ``previous``: the job's newest checkpoint, or empty. A shard of rows that is the same there becomes a hard link.
    """
    columns = {name: tensor for name, tensor in state.rule.items() if name in state.columns}
    rest = {name: tensor for name, tensor in state.rule.items() if name not in state.columns}
    files = write_shards_of_rows(partial, columns, previous[0] if previous else None)
    if rest:
        files[_RULE] = write_tensors(partial / _RULE, table_of(rest), rest.values())
    return files


def _put_together(shards: Path, part: Part, table: TensorTable) -> Iterator[Tensor]:
    """Yield the whole tensors that ``table`` lists, one after another. Read them from the shards on disk, several at a
    time, up to about ``_EXPORT_BYTES``. Other ranks take no part, so they can continue to train."""
    from penstock.services.trainer.checkpoint.sharded_tensors import read_shards

    bucket: dict[str, Tensor] = {}
    for place, (name, shape, dtype) in enumerate(table, 1):
        bucket[f"{part}.{name}"] = torch.empty(shape, dtype=dtype)
        if place == len(table) or sum(tensor.nbytes for tensor in bucket.values()) >= _EXPORT_BYTES:
            read_shards(shards, bucket)
            yield from bucket.values()
            bucket = {}


# -- read ------------------------------------------------------------------------------------------------------------


def verify_share(path: Path, *, rank: int, ranks: int) -> None:
    """Compare this rank's share of the files with the manifest. No rank may load the files before all ranks have
    succeeded.

    Raises:
        CheckpointError: the checkpoint is not committed, or a file is missing or was changed.
    """
    verify_files(read_manifest(path), rank=rank, ranks=ranks)


def load_checkpoint(path: Path, *, into: LearnerState | None = None, verified: bool = False) -> Checkpoint:
    """Verify and read a checkpoint.

    Args:
        into: a state of the learner that will load the checkpoint. The sharded tensors of ``into`` are overwritten with
            this rank's parts, so that no rank ever holds whole ones. None: read whole tensors.
        verified: whether the files have already been compared with the manifest.

    Raises:
        CheckpointError: the checkpoint is not committed, a file is missing or was changed, or ``into`` is another
            model's.
    """
    found = read_manifest(path)
    if not verified:
        verify_files(found)
    models = {}
    for role, prefix in _MODELS.items():
        if prefix + _RNG in found.manifest.files:
            models[role] = _read_model(path, prefix, found.manifest, into.models.get(role) if into else None)
    rule = read_tensors(path / _RULE) if _RULE in found.manifest.files else {}
    rule |= read_shards_of_rows(path, found.manifest)
    return Checkpoint(found, LearnerState(models=models, rule=rule))


def _read_model(path: Path, prefix: str, manifest: CheckpointManifest, into: BackendState | None) -> BackendState:
    directory, stored = path / prefix, _in_directory(manifest, prefix)
    if into is not None and _is_cut(into):
        parts = _fill(directory, stored, into)
    elif f"{_SHARDS}/.metadata" in stored:
        parts = _join(directory / _SHARDS)
    else:
        parts = {part: read_tensors(directory / name) if name in stored else {} for part, name in _FILES.items()}
    described = [name for name in stored if "/" not in name and not name.endswith(".safetensors")]
    return BackendState(
        weights=parts["weights"],
        adapter=parts["adapter"],
        optimizer=parts["optimizer"],
        reference=parts["reference"],
        rng=read_tensors(directory / _RNG),
        files={name: (directory / name).read_bytes() for name in described},
        environment=manifest.environment,
    )


def _in_directory(manifest: CheckpointManifest, prefix: str) -> list[str]:
    """Return the names of one model's files, relative to its directory ``prefix``."""
    own = [name.removeprefix(prefix) for name in manifest.files if name.startswith(prefix)]
    return own if prefix else [name for name in own if not name.startswith(_MODELS["critic"])]


def _join(shards: Path) -> dict[Part, dict[str, Tensor]]:
    """Return the whole tensors of one model, put together from the files in ``shards``. The keys are the part of the
    model (weights, optimizer and so on) and the name of the tensor."""
    from penstock.services.trainer.checkpoint.sharded_tensors import read_shards, shard_table

    tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in shard_table(shards)}
    read_shards(shards, tensors)
    return {part: _of_part(tensors, part) for part in _FILES}


def _fill(directory: Path, stored: list[str], into: BackendState) -> dict[Part, dict[str, Tensor]]:
    """Copy this rank's rows of the stored tensors into the tensors of ``into``; the stored tensors are sharded or
    whole. Return the tensors of ``into`` by part of the model (weights, optimizer and so on) and name."""
    if f"{_SHARDS}/.metadata" in stored:
        from penstock.services.trainer.checkpoint.sharded_tensors import read_shards, shard_table

        table = _empty(shard_table(directory / _SHARDS))
        for part in _FILES:
            check_fits(getattr(into, part), _of_part(table, part), what=_WHAT[part])
        read_shards(directory / _SHARDS, _flat(into))
    else:
        for part, name in _FILES.items():
            own: dict[str, Tensor] = getattr(into, part)
            check_fits(own, _empty(tensor_table(directory / name) if name in stored else []), what=_WHAT[part])
            if own:
                mesh = next(t.device_mesh for t in _flat(into).values() if isinstance(t, DTensor))
                parts = {key: local_part(tensor) for key, tensor in own.items()}
                read_slices(directory / name, parts, partial(rows_of_mesh, mesh=mesh))
    return {part: getattr(into, part) for part in _FILES}


def _is_cut(model: BackendState) -> bool:
    return any(is_sharded(tensor) for tensor in _flat(model).values())


def _flat(model: BackendState) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part in _FILES for name, tensor in getattr(model, part).items()}


def _of_part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}


def _empty(table: TensorTable) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in table}
