"""Writes policy versions as files that an SGLang server loads (``/update_weights_from_disk``).

The worker opens a version like any other receiver, writes it to shared memory as a checkpoint, and reads the file back:
this verifies that the file has the tensors whose digest the trainer announced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.services.rollout.engines.remote import checkpoint_tensors
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Unavailable, WeightsError
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Way, digest_of_tensors, open_receiver

__all__ = ["VersionFiles"]

_PREFIX = "penstock-sglang-"
_LOCK = "owner"
_WEIGHTS = "model.safetensors"


class VersionFiles:
    """Directory of this worker with the files of the staged versions. All methods block.

    Args:
        config: model directory, whose config.json is copied to each version.
    """

    def __init__(self, settings: ServiceSettings, config: Path) -> None:
        self._settings, self._config = settings, config
        self._receiver = open_receiver(settings)
        self._claim = _claim(settings)
        self._sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=settings.shm_dir))
        self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder.mkdir(exist_ok=True)  # the sweep of another worker may have removed it before it was locked
        self._count = 0

    @property
    def claim(self) -> int:
        """Descriptor of the lock that this worker holds on the server at ``sglang_url``; -1 if the URL is empty."""
        return self._claim

    def _sweep(self) -> None:
        """Remove directories of dead workers, recognized by their released locks."""
        for folder in self._settings.shm_dir.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # locked or being removed by another worker, or owned by another user
                lock = os.open(folder / _LOCK, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)

    def write(self, manifest: WeightManifest, routes: WeightRoutes | None) -> tuple[Path, Way]:
        """Write a version to a new directory; returns the directory and how the version was received.

        Raises:
            WeightsError: the version is unreachable, cannot be written, or the written file is damaged.
        """
        if routes is not None:
            self._receiver.follow(self._settings.worker_id, routes)
        staged = self._receiver.stage(manifest)
        self._count += 1
        folder = self._folder / f"{manifest.version}-{self._count}"
        try:
            folder.mkdir()
            tensors = {name: tensor.contiguous() for name, tensor in checkpoint_tensors(staged.tensors().items())}
            save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
            written = digest_of_tensors(tensors.items())
            if not staged.intact():
                raise WeightsError(f"the memory of version {manifest.version} was overwritten while it was read")
            if _digest(folder / _WEIGHTS, list(tensors)) != written:
                raise WeightsError(f"the file of version {manifest.version} in {folder} is damaged")
            shutil.copyfile(self._config / "config.json", folder / "config.json")
        except (OSError, SafetensorError) as error:
            self.remove(folder)
            raise WeightsError(f"cannot write version {manifest.version} to {folder}: {error}") from None
        except WeightsError:
            self.remove(folder)
            raise
        finally:
            staged.release()
        return folder, staged.way

    def remove(self, folder: Path) -> None:
        """Remove the directory of a version."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all versions and release the locks and the receiver. Safe to repeat."""
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
            if self._claim >= 0:
                _claim_path(self._settings).unlink(missing_ok=True)
                os.close(self._claim)
            self._receiver.close()


def _claim(settings: ServiceSettings) -> int:
    """Lock the server at ``sglang_url`` against other jobs on this host; return the lock's descriptor, -1 without URL.

    Raises:
        Unavailable: another job holds the lock.
    """
    if not settings.sglang_url:
        return -1
    lock = os.open(_claim_path(settings), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Unavailable(
            f"the SGLang at {settings.sglang_url} takes one job at a time: it works for another job, or is being"
            " continued after its worker died"
        ) from None
    return lock


def _claim_path(settings: ServiceSettings) -> Path:
    return settings.shm_dir / f"penstock-server-{hashlib.sha256(settings.sglang_url.encode()).hexdigest()[:16]}"


def _digest(path: Path, names: list[str]) -> str:
    with safe_open(path, framework="pt") as file:
        return digest_of_tensors((name, file.get_tensor(name)) for name in names)
