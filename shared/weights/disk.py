"""Weights as safetensors files: the fallback, for late joiners and for hosts that only share a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.subjects import token
from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest
from penstock.shared.weights.base import Way
from penstock.shared.weights.flat import check_layout, fill, view
from penstock.shared.weights.local import BufferPool, LocalStaged

__all__ = ["DiskPublisher", "DiskReceiver", "weights_directory"]


def weights_directory(settings: ServiceSettings, job: str) -> Path:
    """Return the directory of a job's weight files."""
    return settings.data_dir / "weights" / token(job)


class DiskPublisher:
    """Writes each version as one file, atomically, and keeps the newest ``keep`` files."""

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
            try:
                _write(
                    path, view(buffer, self._layout), {"job": self._job, "version": str(version), "epoch": str(epoch)}
                )
                self._forget_old(keep)
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"cannot write version {version} to {self._directory}: {error}") from None
        finally:
            self._pool.give(buffer)
        ref = SlotRef("disk", self._host, str(path), path.stat().st_size)
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

    def _forget_old(self, keep: WeightManifest | None) -> None:
        kept = "" if keep is None else _name(keep.version, keep.epoch)
        for path in sorted(self._directory.glob("*.safetensors"))[: -self._keep]:
            if path.name != kept:
                path.unlink(missing_ok=True)


class DiskReceiver:
    """Reads weight files; the directory must be the publisher's (same host or a shared file system)."""

    def __init__(self, settings: ServiceSettings, layout: Layout | None = None) -> None:
        self._settings, self._layout = settings, layout
        self._pool = BufferPool()

    def accepts(self, ref: SlotRef) -> bool:
        """Return True if the file is visible on this host."""
        return ref.transport == "disk" and Path(ref.handle).exists()

    def stage(self, manifest: WeightManifest) -> LocalStaged:
        """Read a file into memory, verify it, and return the version.

        Raises:
            WeightsError: the file is missing, has other tensors, or is damaged.
        """
        ref = next((ref for ref in manifest.refs if self.accepts(ref)), None)
        if ref is None:
            raise WeightsError(f"there is no file of version {manifest.version} that can be read here")
        layout = check_layout(manifest.layout, self._layout)
        buffer = self._pool.take(layout.nbytes)
        try:
            with safe_open(ref.handle, framework="pt") as file:
                fill(buffer, layout, ((spec.name, file.get_tensor(spec.name)) for spec in layout.tensors))
        except (OSError, SafetensorError, WeightsError) as error:
            self._pool.give(buffer)
            raise WeightsError(f"version {manifest.version} in {ref.handle}: {error}") from None
        return LocalStaged(manifest, buffer, layout, self._pool, Way("disk"))

    def close(self) -> None:
        """Free the spare buffer."""
        self._pool.clear()


def _name(version: int, epoch: int) -> str:
    return f"{epoch:08d}-{version:08d}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        _sync(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
