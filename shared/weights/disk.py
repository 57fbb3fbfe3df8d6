"""Weights as safetensors files, for hosts that share a directory (``settings.weight_disk``) and no network."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ConfigError, UnreadableWeights, WeightsError
from penstock.shared.protocol.subjects import token
from penstock.shared.protocol.weights import ALIGN, Layout, SlotRef, WeightManifest
from penstock.shared.weights.base import Way
from penstock.shared.weights.flat import check_layout, fill
from penstock.shared.weights.local import BufferPool, LocalStaged

__all__ = ["DiskPublisher", "DiskReceiver", "remove_files", "weights_directory"]

logger = logging.getLogger(__name__)

_EPOCH_DIGITS = 8
_DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8",
    "bool": "BOOL", "float64": "F64",
}  # fmt: skip
"""Names of dtypes in the format of safetensors."""


def weights_directory(settings: ServiceSettings, job: str) -> Path:
    """Return the directory of a job's weight files.

    Raises:
        ConfigError: ``settings.weight_disk`` is not set.
    """
    if settings.weight_disk is None:
        raise ConfigError("weights do not go through files here: PENSTOCK_WEIGHT_DISK is not set")
    return settings.weight_disk / token(job)


class DiskPublisher:
    """Writes each version as one file, atomically, and keeps the newest ``keep`` files.

    Raises:
        ConfigError: ``settings.weight_disk`` is not set.
    """

    def __init__(self, job: str, layout: Layout, settings: ServiceSettings, *, keep: int = 2) -> None:
        self._job, self._layout, self._host, self._keep = job, layout, settings.host_id, keep
        self._directory = weights_directory(settings, job)
        self._pool = BufferPool()

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, epoch: int, keep: WeightManifest | None = None
    ) -> WeightManifest:
        """Write a version to a file, fsync and rename the file, and return the manifest.

        Raises:
            WeightsError: the tensors do not fit the layout, or the file cannot be written.
        """
        buffer = self._pool.take(self._layout.nbytes)
        try:
            digest = fill(buffer, self._layout, tensors)
            path = self._directory / _name(version, epoch)
            metadata = {"job": self._job, "version": str(version), "epoch": str(epoch)}
            try:
                self._remove_unfinished(epoch)  # first: they may be what fills the file system
                _write(path, buffer, self._layout, metadata)
                ref = SlotRef("disk", self._host, f"{self._directory.name}/{path.name}", path.stat().st_size)
                self._forget_old(keep)
            except OSError as error:
                raise WeightsError(
                    f"cannot write version {version} to {self._directory} (PENSTOCK_WEIGHT_DISK): "
                    f"{_reason(error, self._directory, _file_bytes(self._layout, metadata))}"
                ) from None
        finally:
            self._pool.give(buffer)
        return WeightManifest(
            job=self._job,
            version=version,
            epoch=epoch,
            layout=self._layout,
            digest=digest,
            refs=(ref,),
            created=time.time(),
        )

    def open(self, layout: Layout, members: Sequence[str], epoch: int) -> None:
        """Do nothing: any process that can access the directory can read the files."""

    def close(self) -> None:
        """Free the buffer; the files stay."""
        self._pool.clear()

    def _remove_unfinished(self, epoch: int) -> None:
        """Remove the unfinished files of trainers whose leadership epoch is at most ``epoch``. A trainer with a higher
        epoch may still be writing."""
        for path in self._directory.glob("[0-9]" * _EPOCH_DIGITS + "-*.tmp"):
            if path.name[:_EPOCH_DIGITS] <= f"{epoch:0{_EPOCH_DIGITS}d}":
                path.unlink(missing_ok=True)

    def _forget_old(self, keep: WeightManifest | None) -> None:
        """Remove all weight files except the newest ones, and except the file of the version ``keep``."""
        kept = "" if keep is None else _name(keep.version, keep.epoch)
        for path in sorted(self._directory.glob("*.safetensors"))[: -self._keep]:
            if path.name != kept:
                path.unlink(missing_ok=True)


class DiskReceiver:
    """Reads weight files from ``settings.weight_disk``, which must be the publisher's directory; its path on this host
    may differ."""

    def __init__(self, settings: ServiceSettings, layout: Layout | None = None) -> None:
        self._settings, self._layout = settings, layout
        self._pool = BufferPool()

    def accepts(self, ref: SlotRef) -> bool:
        """Return True if ``ref`` names a weight file and ``settings.weight_disk`` is set."""
        return ref.transport == "disk" and self._settings.weight_disk is not None

    def stage(self, manifest: WeightManifest) -> LocalStaged:
        """Read a file into memory, verify it, and return the version.

        Raises:
            WeightsError: the file was removed, has other tensors, or is damaged.
            UnreadableWeights: the directory is not the publisher's, or cannot be read.
        """
        ref = next((ref for ref in manifest.refs if self.accepts(ref)), None)
        if ref is None:
            raise WeightsError(f"there is no file of version {manifest.version} that can be read here")
        layout = check_layout(manifest.layout, self._layout)
        path = weights_directory(self._settings, manifest.job) / Path(ref.handle).name
        buffer = self._pool.take(layout.nbytes)
        try:
            _read(path, buffer, layout)
        except (OSError, WeightsError) as error:
            self._pool.give(buffer)
            hint = "; PENSTOCK_WEIGHT_DISK must be the trainer's directory" if isinstance(error, OSError) else ""
            kind = UnreadableWeights if _is_elsewhere(error, path) else WeightsError
            raise kind(f"version {manifest.version} in {path}: {error}{hint}") from None
        return LocalStaged(manifest, buffer, layout, self._pool, Way("disk"))

    def close(self) -> None:
        """Free the spare buffer."""
        self._pool.clear()


def remove_files(settings: ServiceSettings, job: str) -> None:
    """Remove the weight files of a job, if this process has a directory for them."""
    if settings.weight_disk is None:
        return
    directory = weights_directory(settings, job)
    try:
        for pattern in ("*.safetensors", "*.tmp"):
            for path in directory.glob(pattern):
                path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("weight files of %s stay in %s: %s", job, directory, error)
    with contextlib.suppress(OSError):  # another trainer still writes, or there is none
        directory.rmdir()


def _name(version: int, epoch: int) -> str:
    return f"{epoch:0{_EPOCH_DIGITS}d}-{version:08d}.safetensors"


def _write(path: Path, buffer: NDArray[np.uint8], layout: Layout, metadata: dict[str, str]) -> None:
    """Write the tensors of ``buffer``, uint8 [layout.nbytes], to a file in the format of safetensors.

    Its own library first writes to a file whose random name does not say which trainer left it unfinished.
    """
    path.parent.mkdir(exist_ok=True)  # its parent must exist: below a missing mount nobody else would see the files
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_header(layout, metadata))
            for spec in layout.tensors:
                file.write(buffer[spec.offset : spec.offset + spec.nbytes].data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _header(layout: Layout, metadata: dict[str, str]) -> bytes:
    """Return the beginning of a safetensors file: the length of a table, and the table in JSON, padded with spaces."""
    table: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for spec in layout.tensors:
        end = begin + spec.nbytes
        table[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": (begin, end)}
        begin = end
    encoded = msgspec.json.encode(table)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _read(path: Path, buffer: NDArray[np.uint8], layout: Layout) -> None:
    """Read the tensors of a file into ``buffer``, uint8 [layout.nbytes].

    Reads instead of mapping: if the publisher removes a mapped file of a network file system, the kernel kills the
    process that touches it.

    Raises:
        OSError: the file cannot be read.
        WeightsError: the file is not of this layout, or is cut off.
    """
    with path.open("rb", buffering=0) as file:
        header_bytes = int.from_bytes(_take(file, np.empty(8, np.uint8)).tobytes(), "little")
        start = 8 + header_bytes
        if start > path.stat().st_size:
            raise WeightsError("its header is damaged")
        try:
            header = msgspec.json.decode(_take(file, np.empty(header_bytes, np.uint8)).data, type=dict[str, Any])
            offsets = [header[spec.name]["data_offsets"] for spec in layout.tensors]
            places = [(int(begin), int(end)) for begin, end in offsets]
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            raise WeightsError("its header is damaged, or of other tensors") from None
        for spec, (begin, end) in zip(layout.tensors, places, strict=True):
            if end - begin != spec.nbytes:
                raise WeightsError(f"'{spec.name}' has {end - begin} bytes, the layout needs {spec.nbytes}")
            file.seek(start + begin)
            after = spec.offset + spec.nbytes
            _take(file, buffer[spec.offset : after])
            buffer[after : after + -after % ALIGN] = 0


def _file_bytes(layout: Layout, metadata: dict[str, str]) -> int:
    """Return the size of the file that ``_write`` writes."""
    return len(_header(layout, metadata)) + sum(spec.nbytes for spec in layout.tensors)


def _reason(error: OSError, directory: Path, nbytes: int) -> str:
    """Describe an error in writing a file of ``nbytes`` bytes. If the disk was full, the text has the number of free
    bytes."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return str(error)
    free = ""
    with contextlib.suppress(OSError):
        stat = os.statvfs(directory)
        free = f", and {stat.f_bavail * stat.f_frsize} are free"  # not counting a quota
    return f"{error.strerror}: the file needs {nbytes} bytes{free}; make room there"


def _is_elsewhere(error: Exception, path: Path) -> bool:
    """Return True if the error concerns the directory: it is not the publisher's directory, or this process may not
    read it."""
    if isinstance(error, FileNotFoundError):
        return not path.parent.is_dir()  # a publisher makes it before the first file
    return isinstance(error, OSError)


def _take(file: FileIO, target: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Fill ``target``, uint8 [bytes], from a file, and return it. Raises WeightsError if the file is too short."""
    left = target.data
    while left.nbytes:
        count = file.readinto(left)
        if not count:
            raise WeightsError("the file is cut off")
        left = left[count:]
    return target


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
