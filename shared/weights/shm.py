"""Weights through shared memory: the publisher fills a slot, receivers of the same host map it and use the views."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import NotFound, Unavailable, UnreadableWeights, WeightsError
from penstock.shared.protocol.weights import ALIGN, Layout, SlotRef, WeightManifest
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile, map_file
from penstock.shared.transport.bulk_server import BlobServer, ServedBlob
from penstock.shared.weights.base import Way
from penstock.shared.weights.collective import CollectivePublisher
from penstock.shared.weights.delta import encode
from penstock.shared.weights.flat import check_layout, digest_of, fill, view
from penstock.shared.weights.slot_header import SlotHeader, read_slot, sequence_of, write_slot
from penstock.shared.weights.slots import SlotPool, is_slot_name, lock_version, slot_paths

__all__ = ["ShmPublisher", "ShmReceiver", "ShmStaged"]

logger = logging.getLogger(__name__)


class ShmPublisher:
    """Publishes into slots under ``settings.shm_dir``; with ``settings.bulk_host`` other hosts can pull them.

    With ``settings.weight_deltas`` they can also pull the changes to another version that is in a slot.
    """

    def __init__(
        self,
        job: str,
        layout: Layout,
        settings: ServiceSettings,
        *,
        slots: int = 2,
        max_slots: int = 4,
        timeout_s: float = 30.0,
    ) -> None:
        """Create the slots (about a second per gigabyte), or adopt the slots of a crashed publisher.

        Raises:
            Unavailable: ``settings.shm_dir`` has no room for them, or ``settings.bulk_host`` cannot be bound.
        """
        self._job, self._layout, self._host, self._timeout_s = job, layout, settings.host_id, timeout_s
        self._directory, self._deltas = settings.shm_dir, settings.weight_deltas
        self._pool = SlotPool(settings.shm_dir, job, layout.nbytes, count=slots, max_count=max_slots)
        self._server = None
        if settings.bulk_host:
            self._server = BlobServer(settings.bulk_host, self._serve, settings.bulk_tls_server)
        self._broadcast: CollectivePublisher | None = None
        if settings.bulk_host and settings.weight_collective:
            self._broadcast = CollectivePublisher(settings.bulk_host, settings.weight_collective)

    @property
    def waiting(self) -> tuple[str, float] | None:
        """Current wait of ``publish`` for a slot: its reason and its start; None if it does not wait. See
        ``SlotPool.waiting``."""
        return self._pool.waiting

    def open(self, layout: Layout, members: Sequence[str], epoch: int) -> None:
        """Broadcast versions to ``members`` from now on, if the settings enable broadcasts; see
        ``CollectivePublisher.open``."""
        if self._broadcast is not None:
            self._broadcast.open(layout, members, epoch)

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, epoch: int, keep: WeightManifest | None = None
    ) -> WeightManifest:
        """Fill a free slot and return the manifest. The slots of the previous version and of the version ``keep`` stay
        unchanged.

        Raises:
            WeightsError: the tensors do not fit the layout; no manifest is returned.
            DeadlineError: receivers held every slot for ``timeout_s``; the message names them.
            Fenced: a publisher with a higher epoch has written to the slots.
        """
        layout = self._layout
        slot = self._pool.acquire(epoch=epoch, timeout_s=self._timeout_s, keep=keep)
        try:
            sequence = read_slot(slot).sequence | 1  # a crashed writer left it odd
            header = SlotHeader(sequence, version, epoch, layout.nbytes, layout.id)
            write_slot(slot, header)
            digest = fill(slot.data, layout, tensors)
            write_slot(slot, msgspec.structs.replace(header, sequence=sequence + 1, digest=digest))
        finally:
            slot.unlock()
        refs = [SlotRef("shm", self._host, slot.path.name, layout.nbytes)]
        if self._broadcast is not None:
            ref = self._broadcast.offer(lambda: self._bytes(slot.path.name, sequence + 1))
            refs += [ref] if ref is not None else []
        if self._server:
            token = self._server.token(slot.path.name, sequence + 1)
            bases = self._pool.digests(layout) if self._deltas else []
            handle = "/".join([self._server.address, slot.path.name, str(sequence + 1), token, *bases])
            refs.append(SlotRef("tcp", self._host, handle, layout.nbytes))
        return WeightManifest(
            job=self._job,
            version=version,
            epoch=epoch,
            layout=layout,
            digest=digest,
            refs=tuple(refs),
            created=time.time(),
        )

    def close(self) -> None:
        """Stop serving other hosts and unmap the slots; the files stay for receivers and for a successor."""
        if self._broadcast is not None:
            self._broadcast.close()
        if self._server:
            self._server.close()
        self._pool.close()

    @contextlib.contextmanager
    def _bytes(self, name: str, generation: int) -> Iterator[NDArray[np.uint8]]:
        """Map a slot and yield its bytes for the broadcast; as in ``_serve``, the slot is locked until the block
        ends."""
        with self._serve(name, generation) as blob:
            file = LockedFile.open(blob.path)
            data = np.frombuffer(map_file(file.fd, "private"), np.uint8)
            file.close()
            yield data[blob.offset :]

    @contextlib.contextmanager
    def _serve(self, name: str, generation: int) -> Iterator[ServedBlob]:
        """Lock slot ``name`` and yield its content for the server; unlock it when the transfer ends.

        A ``?`` in the name begins a request for changes: see ``_changes``.

        Raises:
            NotFound: the job has no such slot, it cannot be read, or ``generation`` is no longer its sequence
                number.
        """
        name, _, wanted = name.partition("?")
        if not is_slot_name(self._job, name):
            raise NotFound(f"'{name}' is not a slot of job '{self._job}'")
        try:
            file = self._current(name, generation)
        except (Unavailable, WeightsError) as error:  # the reason is only known here: other hosts learn that it is gone
            logger.warning("slot '%s' of job '%s' cannot be served to other hosts: %s", name, self._job, error)
            raise NotFound(f"slot '{name}' cannot be read") from None
        try:
            blob = ServedBlob(file.path, DATA_OFFSET, self._layout.nbytes, self._pool.data_of(file))
            with self._changes(blob, wanted) if wanted else contextlib.nullcontext(blob) as served:
                yield served
        finally:
            file.close()

    @contextlib.contextmanager
    def _changes(self, blob: ServedBlob, wanted: str) -> Iterator[ServedBlob]:
        """Yield one bucket of the version ``blob`` as a delta from another version. If too much has changed, yield the
        bucket itself.

        ``wanted``: ``<digest of the other version>/<first byte of the bucket>/<its end>``. The slot of the other
        version is locked only while its bytes are compared.

        Raises:
            NotFound: the other version is not in a slot, or there is no such bucket.
        """
        digest, *numbers = wanted.split("/")
        if len(numbers) != 2 or not all(each.isdecimal() and len(each) < 16 for each in numbers) or blob.data is None:
            raise NotFound(f"'{wanted}' does not name changes")
        start, stop = map(int, numbers)
        if not start < stop <= blob.nbytes or (start | stop) % ALIGN:
            raise NotFound(f"there is no bucket from byte {start} to {stop}")
        if (found := lock_version(slot_paths(self._directory, self._job), self._layout, (digest,))) is None:
            raise NotFound(f"version {digest} is in no slot")
        base, _ = found
        try:
            if (before := self._pool.data_of(base)) is None:
                raise NotFound(f"slot '{base.path.name}' is not mapped")
            delta = encode(before[start:stop], blob.data[start:stop])
        finally:
            base.close()
        if delta is None:
            yield ServedBlob(blob.path, blob.offset + start, stop - start, blob.data[start:stop])
            return
        with _in_file(delta) as path:
            yield ServedBlob(path, 0, delta.nbytes, delta)

    def _current(self, name: str, generation: int) -> LockedFile:
        """Open and lock a slot, check that its sequence number is still ``generation``, and return it.

        Raises:
            NotFound: there is no such slot, or it has another sequence number by now.
            Unavailable: the file cannot be opened.
            WeightsError: the file is not a slot.
        """
        file = LockedFile.open(self._directory / name)
        try:
            if not file.try_shared() or read_slot(file).sequence != generation:
                raise NotFound(f"slot '{name}' was written anew")
        except BaseException:
            file.close()
            raise
        return file


@contextlib.contextmanager
def _in_file(data: NDArray[np.uint8]) -> Iterator[Path]:
    """Write ``data``, uint8 [bytes], to a file in memory, and yield its path, which is valid in this process."""
    fd = os.memfd_create("penstock-delta")
    with os.fdopen(fd, "wb") as file:
        file.write(data.data)
        file.flush()
        yield Path(f"/proc/self/fd/{fd}")


# Only ``release`` or the end of the process may drop a lock: tensors can outlive the ``ShmStaged`` they came from.
_held: set[LockedFile] = set()


class ShmStaged:
    """Version in a shared-memory slot; this process holds a lock on the slot."""

    def __init__(
        self, manifest: WeightManifest, lock: LockedFile, mapping: NDArray[np.uint8], layout: Layout, way: Way
    ) -> None:
        self.manifest, self.way = manifest, way
        self._lock = lock
        self._page = mapping[:DATA_OFFSET].data
        self._sequence = read_slot(lock).sequence
        self._tensors = view(mapping[DATA_OFFSET:], layout)
        _held.add(lock)

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the slot. Do not write to them: a written page becomes a private copy of this process, which
        does not change when the publisher writes the next version. ``ShmReceiver`` would then find a wrong digest, and
        would have to map the slot again and verify it a second time."""
        return self._tensors

    def intact(self) -> bool:
        """Return True if the slot was not written since it was staged. Reads the slot's sequence counter."""
        return sequence_of(self._page) == self._sequence

    def release(self) -> None:
        """Release the lock and the views, so that the publisher may write to the slot."""
        _held.discard(self._lock)
        self._lock.close()
        self._tensors = {}


class ShmReceiver:
    """Maps the slots of publishers on this host. Mappings are kept, because publishers reuse their slots."""

    def __init__(self, settings: ServiceSettings, layout: Layout | None = None) -> None:
        self._host, self._directory, self._layout = settings.host_id, settings.shm_dir, layout
        self._mappings: dict[str, tuple[tuple[int, int], NDArray[np.uint8]]] = {}

    def accepts(self, ref: SlotRef) -> bool:
        """Return True if ``ref`` names a shared-memory slot on the host of this receiver."""
        return ref.transport == "shm" and ref.host == self._host

    def stage(self, manifest: WeightManifest) -> ShmStaged:
        """Lock the slot, compare its header with the manifest, verify its digest, and return it.

        Raises:
            WeightsError: the slot is missing, has another version by now, or damaged bytes. The lock is released.
            UnreadableWeights: this user may not open the slot, or the engine has another model.
        """
        ref = next((ref for ref in manifest.refs if self.accepts(ref)), None)
        if ref is None:
            raise WeightsError(f"version {manifest.version} has no slot on host '{self._host}'")
        if not is_slot_name(manifest.job, ref.handle):
            raise WeightsError(f"'{ref.handle}' is not a slot of job '{manifest.job}'")
        return self.open(self._directory / ref.handle, manifest, Way("shm"))

    def open(self, path: Path, manifest: WeightManifest, way: Way, *, verify: bool = True) -> ShmStaged:
        """Lock and verify the slot at ``path``, and return it. ``verify=False`` skips the comparison of the digest,
        which the caller has done.

        Raises:
            WeightsError: as ``stage``.
        """
        layout = check_layout(manifest.layout, self._layout)
        try:
            lock = LockedFile.open(path)
        except NotFound as error:
            raise WeightsError(f"version {manifest.version}: {error}") from None
        except Unavailable as error:
            raise UnreadableWeights(f"version {manifest.version}: {error}") from None
        try:
            return ShmStaged(manifest, lock, self._verified(manifest, lock, verify), layout, way)
        except BaseException:
            lock.close()
            raise

    def close(self) -> None:
        """Drop the mappings."""
        self._mappings.clear()

    def _verified(self, manifest: WeightManifest, lock: LockedFile, verify: bool) -> NDArray[np.uint8]:
        what = f"slot {lock.path.name} for version {manifest.version}"
        if not lock.try_shared():
            raise WeightsError(f"{what} is being written")
        if reason := read_slot(lock).mismatch(manifest):
            raise WeightsError(f"{what}: {reason}")
        if lock.size() != DATA_OFFSET + manifest.layout.nbytes:
            raise WeightsError(f"{what} has {lock.size()} bytes, the layout needs {manifest.layout.nbytes}")
        for _ in range(2):
            mapping = self._mapping(lock)
            if not verify or digest_of(mapping[DATA_OFFSET:]) == manifest.digest:
                return mapping
            del self._mappings[lock.path.name]  # pages written by this process are private copies: read the file again
        raise WeightsError(f"{what}: the bytes do not match digest {manifest.digest}")

    def _mapping(self, lock: LockedFile) -> NDArray[np.uint8]:
        """Return the mapping of the locked file; map the file anew if it has replaced an earlier file of the same
        name."""
        known = self._mappings.get(lock.path.name)
        if known is None or known[0] != lock.identity():
            gone = [name for name in self._mappings if not (self._directory / name).exists()]
            for name in gone:
                del self._mappings[name]
            mapping = np.frombuffer(map_file(lock.fd, "private"), np.uint8)
            known = self._mappings[lock.path.name] = (lock.identity(), mapping)
        return known[1]
