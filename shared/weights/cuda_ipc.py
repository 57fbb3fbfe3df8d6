"""Weights from GPU to GPU within a host (CUDA IPC): the publisher exports slots in device memory, receivers copy them.

A slot has a file beside those of shared memory, with the same header and locks and without data. Its device memory
belongs to the publishing process and ends with that process, so no other publisher adopts a slot. A receiver serves a
private copy, which it makes and verifies while it holds the lock of the slot. The publisher keeps a file locked: once
that lock is gone, receivers refuse its handles. Receivers lock another file for as long as they map the publisher's
memory, so that a living publisher does not free it before they unmap it: CUDA leaves reads of freed memory undefined.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import DeadlineError, NotFound, Unavailable, UnreadableWeights, WeightsError
from penstock.shared.protocol.subjects import token
from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest
from penstock.shared.transport.bulk_segment import LockedFile, Owner, Segment, sweep
from penstock.shared.weights.base import Way, WeightPublisher
from penstock.shared.weights.device import DeviceBuffer, DeviceMemory
from penstock.shared.weights.flat import check_layout, place, view
from penstock.shared.weights.slot_header import SlotHeader, read_slot, write_slot
from penstock.shared.weights.slots import SlotPool

__all__ = ["CudaIpcPublisher", "CudaIpcReceiver", "device_slot_paths"]

logger = logging.getLogger(__name__)

SLOTS, MAX_SLOTS = 2, 3
ROOM_S = 1.0
"""Longest wait for a slot without readers (seconds); afterwards only the other transports publish the version."""
NAME_S = 30.0
"""Time after which the processes that map the memory of a closed publisher are logged (seconds)."""
_POLL_S = 0.05


def device_slot_paths(directory: Path, job: str) -> list[Path]:
    """Return the files in ``directory`` of all processes that publish a job's weights from GPUs of this host."""
    return sorted(directory.glob(_prefix(job) + "*"))


def _prefix(job: str) -> str:
    return f"penstock-device-{token(job)}."


def _mapped_path(directory: Path, owner: str) -> Path:
    """Return the path of a publisher's lock file; receivers lock the file while they map the publisher's memory."""
    return directory / f"{owner}-mapped"


@contextlib.contextmanager
def _errors_of_devices(what: str) -> Iterator[None]:
    """Convert any error inside the block to WeightsError, because errors of a GPU driver, its compiler and an allocator
    have no common base class."""
    try:
        yield
    except Exception as error:
        raise WeightsError(f"{what}: {error}") from None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class _Handle:
    """Parsed ``handle`` of a ``SlotRef``. ``memory`` is a CUDA IPC handle of 64 bytes, ``digest`` is ``mixed_digest``
    of the slot."""

    slot: str
    device: str
    boot: str
    memory: bytes
    digest: str

    def __str__(self) -> str:
        return "/".join((self.slot, self.device, self.boot, self.memory.hex(), self.digest))

    @classmethod
    def read(cls, ref: SlotRef, job: str) -> Self:
        """Parse a reference. Raises WeightsError if its handle is not the handle of a device slot of ``job``."""
        slot, device, boot, memory, digest = [*ref.handle.split("/"), "", "", "", "", ""][:5]
        if not re.fullmatch(re.escape(_prefix(job)) + "[0-9a-f]{16}-[0-9]{1,9}", slot):
            raise WeightsError(f"'{slot}' is not a device slot of job '{job}'")
        if not re.fullmatch("[0-9a-f]{128}", memory):
            raise WeightsError(f"'{ref.handle}' has no handle of 64 bytes")
        return cls(slot, device, boot, bytes.fromhex(memory), digest)

    @property
    def owner(self) -> str:
        """Name of the publishing process."""
        return self.slot.rpartition("-")[0]


class CudaIpcPublisher:
    """Copies each version to a slot in GPU memory and publishes the slot by CUDA IPC. A second publisher, ``host``,
    publishes the same version for all other receivers.

    Args:
        host: publishes the same version to receivers that cannot read this device, and computes the version's digest.
    """

    def __init__(
        self, job: str, layout: Layout, settings: ServiceSettings, memory: DeviceMemory, host: WeightPublisher
    ) -> None:
        self._layout, self._host_id, self._memory, self._host = layout, settings.host_id, memory, host
        self._boot = _boot_id()
        sweep(settings.shm_dir, _prefix(job))
        self._owner = Owner(settings.shm_dir, _prefix(job))
        stem = f"{self._owner.stem}-"
        self._pool = SlotPool(settings.shm_dir, job, 0, count=SLOTS, max_count=MAX_SLOTS, stem=stem)
        self._buffers: dict[Path, DeviceBuffer] = {}
        mapped = _mapped_path(settings.shm_dir, self._owner.stem)
        self._mapped: LockedFile | None = LockedFile(mapped, os.open(mapped, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        self._lock = threading.Lock()
        """Held while memory of the device is written, read or freed."""

    def open(self, layout: Layout, members: Sequence[str], epoch: int) -> None:
        """See ``WeightPublisher``."""
        self._host.open(layout, members, epoch)

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, epoch: int, keep: WeightManifest | None = None
    ) -> WeightManifest:
        """Fill a free slot in GPU memory, and publish the same content through the host-memory publisher ``host``; see
        ``WeightPublisher``.

        The manifest has no reference to the device if the device has no room, if receivers hold all of its slots, or if
        it fails to compute the digest. Raises WeightsError after ``close``.
        """
        with self._lock:
            if self._mapped is None:
                raise WeightsError(f"version {version} is not published: its publisher is closed")
            return self._publish(tensors, version=version, epoch=epoch, keep=keep)

    def _publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, epoch: int, keep: WeightManifest | None
    ) -> WeightManifest:
        slot = self._free_slot(epoch)
        if slot is None:
            return self._host.publish(tensors, version=version, epoch=epoch, keep=keep)
        buffer, layout = self._buffers[slot.path], self._layout
        try:
            sequence = read_slot(slot).sequence | 1
            header = SlotHeader(sequence, version, epoch, layout.nbytes, layout.id)
            write_slot(slot, header)
            place(buffer.flat, layout, tensors)
            digest = self._digest(buffer.flat)
            named = view(buffer.flat, layout).items()
            manifest = self._host.publish(named, version=version, epoch=epoch, keep=keep)
            if digest:
                write_slot(slot, msgspec.structs.replace(header, sequence=sequence + 1, digest=manifest.digest))
        finally:
            slot.unlock()
        handle = _Handle(slot.path.name, self._memory.device, self._boot, buffer.handle, digest)
        ref = SlotRef("cuda_ipc", self._host_id, str(handle), layout.nbytes)
        return msgspec.structs.replace(manifest, refs=(ref, *manifest.refs)) if digest else manifest

    def close(self) -> None:
        """Remove the slots, once no thread publishes. The GPU memory is freed as soon as no receiver maps it.

        Safe to repeat.
        """
        with self._lock:
            mapped, self._mapped = self._mapped, None
            if mapped is not None:
                self._owner.close()
                buffers = list(self._buffers.values())
                self._buffers.clear()
                self._pool.close()
                if not _freed(mapped, buffers):
                    threading.Thread(target=_free, args=(mapped, buffers), name="weights-free", daemon=True).start()
            self._host.close()

    def _digest(self, flat: Tensor) -> str:
        """Return the digest of a filled slot; '' if the device fails to compute it."""
        try:
            with _errors_of_devices("the digest cannot be computed"):
                return self._memory.digest(flat)
        except WeightsError as error:
            logger.warning("weights do not go by cuda_ipc: %s", error)
            return ""

    def _free_slot(self, epoch: int) -> Segment | None:
        """Return a locked slot with GPU memory. None: receivers hold all slots, or there is no room for another slot
        file or for its GPU memory."""
        try:
            slot = self._pool.acquire(epoch=epoch, timeout_s=ROOM_S)
        except (DeadlineError, Unavailable) as error:
            logger.warning("weights do not go by cuda_ipc: %s", error)
            return None
        try:
            if slot.path not in self._buffers:
                self._buffers[slot.path] = self._memory.allocate(self._layout.nbytes)
        except Unavailable as error:
            slot.unlock()
            logger.warning("weights do not go by cuda_ipc: %s", error)
            return None
        return slot


def _freed(mapped: LockedFile, buffers: list[DeviceBuffer]) -> bool:
    """Free device memory unless a receiver maps it; return True if the memory was freed."""
    if not mapped.try_exclusive():
        return False
    mapped.close()
    for buffer in buffers:
        buffer.close()
    return True


def _free(mapped: LockedFile, buffers: list[DeviceBuffer]) -> None:
    """Free GPU memory once no receiver maps it. The wait has no deadline, because reads of freed memory are undefined;
    a log message names the processes that map it."""
    name_at = time.monotonic() + NAME_S
    while not _freed(mapped, buffers):
        if time.monotonic() > name_at:
            pids = ", ".join(map(str, mapped.holders())) or "outside of this pid namespace"
            nbytes = sum(buffer.flat.nbytes for buffer in buffers)
            logger.warning("%d bytes of a GPU stay allocated: process %s still maps them", nbytes, pids)
            name_at = math.inf
        time.sleep(_POLL_S)


class DeviceStaged:
    """Version in private device memory."""

    def __init__(self, manifest: WeightManifest, flat: Tensor, layout: Layout) -> None:
        self.manifest, self.way = manifest, Way("cuda_ipc")
        self._tensors = view(flat, layout)

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the memory."""
        return self._tensors

    def intact(self) -> bool:
        """Return True: no other process can write to private memory."""
        return True

    def release(self) -> None:
        """Drop the views. The memory is freed once the engine has dropped its views, too."""
        self._tensors = {}


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A publisher's memory, mapped into this process. ``buffers`` has the mapped buffers by CUDA handle. ``lock``,
    which this process holds, prevents the publisher from freeing the memory."""

    owner: str
    lock: LockedFile
    buffers: dict[bytes, DeviceBuffer] = field(default_factory=dict)

    def close(self) -> None:
        """Unmap the memory. Errors of the driver are ignored, because the publisher's process may have ended."""
        for buffer in self.buffers.values():
            with contextlib.suppress(RuntimeError):
                buffer.close()
        self.lock.close()


class CudaIpcReceiver:
    """Copies slots from publishers' GPUs on this host to the engine's GPU; keeps the opened CUDA handles."""

    def __init__(self, settings: ServiceSettings, memory: DeviceMemory, layout: Layout | None = None) -> None:
        self._host, self._directory, self._layout, self._memory = settings.host_id, settings.shm_dir, layout, memory
        self.devices = memory.reachable
        """Unique ids of the GPUs whose memory this receiver can read."""
        self._mapped: dict[str, _Mapped] = {}
        """Memory of the newest publisher of each job."""
        self._lock = threading.Lock()
        """Held while memory is read or unmapped, because a stopping worker may call ``close`` while a thread stages a
        version."""

    def accepts(self, ref: SlotRef) -> bool:
        """Return True if ``ref`` names a device slot on the host of this receiver."""
        return ref.transport == "cuda_ipc" and ref.host == self._host

    def stage(self, manifest: WeightManifest) -> DeviceStaged:
        """Lock the slot, compare its header with the manifest, copy it, and return the copy with a verified digest.

        Raises:
            WeightsError: the slot has another version by now or damaged bytes, its publisher ended, or the copy
                failed. The lock is released.
            UnreadableWeights: this device cannot read that of the slot, this user may not open the publisher's files,
                or the engine has another model.
        """
        ref = next((ref for ref in manifest.refs if self.accepts(ref)), None)
        if ref is None:
            raise WeightsError(f"version {manifest.version} has no device slot on host '{self._host}'")
        layout, handle = check_layout(manifest.layout, self._layout), _Handle.read(ref, manifest.job)
        what = f"device slot {handle.slot} for version {manifest.version}"
        if handle.boot != _boot_id():
            raise WeightsError(f"{what} was made before host '{self._host}' booted")
        if handle.device not in self._memory.reachable:
            raise UnreadableWeights(f"{what}: GPU {self._memory.device} cannot read memory of GPU {handle.device}")
        with self._lock:
            try:
                mapped = self._publisher(manifest.job, handle.owner)
                slot = LockedFile.open(self._directory / handle.slot)
            except NotFound as error:
                raise WeightsError(f"{what}: {error}") from None
            except Unavailable as error:
                raise UnreadableWeights(f"{what}: {error}") from None
            try:
                if not slot.try_shared():
                    raise WeightsError(f"{what} is being written")
                if reason := read_slot(slot).mismatch(manifest):
                    raise WeightsError(f"{what}: {reason}")
                return DeviceStaged(manifest, self._copied(mapped, handle, layout.nbytes, what), layout)
            finally:
                slot.close()

    def prune(self, manifest: WeightManifest) -> None:
        """Unmap the memory of publishers that ended. Of the publishers of the manifest's job, keep only those that the
        manifest names.

        Call it before any transport stages ``manifest``. Unmapped memory can hold no later version, and a living
        publisher frees its memory only once no receiver maps it.
        """
        named = {ref.handle.partition("/")[0].rpartition("-")[0] for ref in manifest.refs if self.accepts(ref)}
        with self._lock:
            for job, mapped in list(self._mapped.items()):
                replaced = job == manifest.job and mapped.owner not in named
                with contextlib.suppress(Unavailable):
                    if replaced or not self._lives(mapped.owner):
                        self._mapped.pop(job).close()

    def close(self) -> None:
        """Unmap the memory of publishers, once no thread reads it; staged versions stay valid."""
        with self._lock:
            while self._mapped:
                self._mapped.popitem()[1].close()

    def _publisher(self, job: str, owner: str) -> _Mapped:
        """Return the mapped memory of the living publisher ``owner``; unmap the memory of the job's earlier publisher.

        Raises:
            NotFound: the publisher ended.
            Unavailable: its files belong to another user.
        """
        mapped = self._mapped.pop(job, None)
        if mapped is not None and mapped.owner != owner:
            mapped.close()
            mapped = None
        try:
            if mapped is None:
                mapped = _Mapped(owner, LockedFile.open(_mapped_path(self._directory, owner)))
            if not mapped.lock.try_shared() or not self._lives(owner):
                raise NotFound("its publisher ended")
        except (NotFound, Unavailable) as error:
            if mapped is not None:
                mapped.close()
            if isinstance(error, Unavailable):
                raise
            raise NotFound("the process that published it ended, and its device memory with it") from None
        self._mapped[job] = mapped
        return mapped

    def _lives(self, owner: str) -> bool:
        """Return True if the publisher ``owner`` still locks its owner file.

        Raises:
            Unavailable: the file belongs to another user.
        """
        try:
            mark = LockedFile.open(self._directory / f"{owner}.owner")
        except NotFound:
            return False
        try:
            return not mark.try_shared()
        finally:
            mark.close()

    def _copied(self, mapped: _Mapped, handle: _Handle, nbytes: int, what: str) -> Tensor:
        """Return a verified copy of a slot. Raises WeightsError."""
        with _errors_of_devices(f"{what} cannot be read"):
            if handle.memory not in mapped.buffers:
                mapped.buffers[handle.memory] = self._memory.open(handle.memory, nbytes)
            flat = self._memory.empty(nbytes)
            digest = self._memory.copy(mapped.buffers[handle.memory].flat, flat)
        if digest != handle.digest:
            raise WeightsError(f"{what}: the bytes do not match digest {handle.digest}")
        return flat
