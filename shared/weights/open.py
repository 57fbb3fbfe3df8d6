"""Publisher and receiver that combine several weight transports; the host ids of both sides decide which transports are
possible."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ConfigError, UnreadableWeights, WeightsError
from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest, WeightRoutes
from penstock.shared.weights.base import Staged, WeightPublisher, WeightReceiver
from penstock.shared.weights.collective import CollectiveReceiver
from penstock.shared.weights.cuda_ipc import CudaIpcPublisher, CudaIpcReceiver, device_slot_paths
from penstock.shared.weights.device import DeviceMemory
from penstock.shared.weights.disk import DiskPublisher, DiskReceiver, remove_files
from penstock.shared.weights.shm import ShmPublisher, ShmReceiver
from penstock.shared.weights.slots import slot_paths, turn_path
from penstock.shared.weights.tcp import TcpReceiver

__all__ = ["Publisher", "Receiver", "cleanup", "open_publisher", "open_receiver"]

logger = logging.getLogger(__name__)

Transport = Literal["shm", "disk"]


class Publisher:
    """Publishes through several transports; the manifest lists all references, the fastest first.

    Args:
        devices: unique ids of the GPUs in whose memory the transports publish.
        slots: reader of the slots of the first transport; required if there are several.
        behind: publisher that the first transport uses for processes that it does not reach itself.
    """

    def __init__(
        self,
        publishers: Sequence[WeightPublisher],
        devices: tuple[str, ...] = (),
        slots: ShmReceiver | None = None,
        behind: Publisher | None = None,
    ) -> None:
        self._publishers, self.devices, self._slots, self._behind = publishers, devices, slots, behind
        self._incomplete: WeightManifest | None = None
        """Last version while only the first transport has it."""
        self._problem = ""

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, epoch: int, keep: WeightManifest | None = None
    ) -> WeightManifest:
        """See ``WeightPublisher``. Raises if the first transport fails; if another transport fails, the manifest has no
        reference to it.

        The first transport consumes the tensors one at a time, and each tensor need only be valid until the next one is
        requested: sharded models rely on that. The others read what the first one has written.
        """
        self._incomplete, self._problem = None, ""
        manifest = self._publishers[0].publish(tensors, version=version, epoch=epoch, keep=keep)
        if self._slots is None:
            return manifest
        self._incomplete = manifest
        return msgspec.structs.replace(manifest, refs=manifest.refs + self.complete(keep))

    def complete(self, keep: WeightManifest | None = None) -> tuple[SlotRef, ...]:
        """Publish the last version by the transports that have failed to publish it so far; return the new references.

        The version in the manifest ``keep`` stays available: the one that is served now, not when the transport failed.
        If one fails again, log and keep the reason (``problem``) and return ().
        """
        if self._behind is not None:
            return self._behind.complete(keep)
        if self._incomplete is None or self._slots is None:
            return ()
        manifest, others = self._incomplete, self._publishers[1:]
        version, epoch = manifest.version, manifest.epoch
        try:
            staged = self._slots.stage(manifest)
            try:
                written = staged.tensors().items()
                further = [each.publish(written, version=version, epoch=epoch, keep=keep) for each in others]
            finally:
                staged.release()
        except WeightsError as error:
            self._problem = f"{error}; other transports have this version"
            logger.warning("%s", self._problem)
            return ()
        self._incomplete, self._problem = None, ""
        return tuple(ref for each in further for ref in each.refs)

    @property
    def problem(self) -> str:
        """Reason why a transport could not publish the last version; '' if all transports published it."""
        return self._problem if self._behind is None else self._behind.problem

    @property
    def waiting(self) -> tuple[str, float] | None:
        """Current wait of ``publish`` for a slot: its reason and its start; None if it does not wait. See
        ``SlotPool.waiting``."""
        if self._behind is not None:
            return self._behind.waiting
        return next((each.waiting for each in self._publishers if isinstance(each, ShmPublisher)), None)

    def open(self, layout: Layout, members: Sequence[str], epoch: int) -> None:
        """See ``WeightPublisher``."""
        for publisher in self._publishers:
            publisher.open(layout, members, epoch)

    def close(self) -> None:
        """Close every transport."""
        if self._slots is not None:
            self._slots.close()
        for publisher in self._publishers:
            publisher.close()


class Receiver:
    """Tries the transport chosen by the coordinator, then the others: CUDA IPC, shared memory, broadcast, TCP, disk.

    Args:
        receivers: one for each transport, by its name, in the order in which they are tried.
        member: the one of ``receivers`` that takes part in broadcasts; None if there is none.
        device: the one of ``receivers`` that maps memory of GPUs; None if there is none.
    """

    def __init__(
        self,
        receivers: Mapping[str, WeightReceiver],
        member: CollectiveReceiver | None = None,
        device: CudaIpcReceiver | None = None,
    ) -> None:
        self._receivers, self._member, self._device = dict(receivers), member, device
        self._epochs: dict[str, int] = {}
        self._chosen = ""

    @property
    def transports(self) -> list[str]:
        """Names of the transports that the coordinator can choose from."""
        return list(self._receivers)

    @property
    def devices(self) -> tuple[str, ...]:
        """Unique ids of the GPUs whose memory this receiver can read."""
        return () if self._device is None else self._device.devices

    def follow(self, worker: str, routes: WeightRoutes) -> None:
        """Apply ``routes``, the coordinator's choice of transports; ``worker`` is the name of this worker."""
        self._chosen = routes.transports.get(worker, "")
        if self._member is not None:
            self._member.join(routes.members, routes.epoch)

    def accepts(self, ref: SlotRef) -> bool:
        """Return True if one of the transports can use ``ref``."""
        return any(receiver.accepts(ref) for receiver in self._receivers.values())

    def stage(self, manifest: WeightManifest) -> Staged:
        """See ``WeightReceiver``; if one transport fails, the next one is tried.

        Raises:
            WeightsError: no transport works (the message has all reasons), or the manifest is from a replaced trainer.
            UnreadableWeights: no transport would work if the version were published again, either.
        """
        known = self._epochs.get(manifest.job, 0)
        if manifest.epoch < known:
            raise WeightsError(f"version {manifest.version} is of epoch {manifest.epoch}, epoch {known} took over")
        if self._device is not None:
            self._device.prune(manifest)
        errors: list[WeightsError] = []
        first = [self._receivers[self._chosen]] if self._chosen in self._receivers else []
        for receiver in (*first, *(one for one in self._receivers.values() if one not in first)):
            if any(receiver.accepts(ref) for ref in manifest.refs):
                try:
                    staged = receiver.stage(manifest)
                except WeightsError as error:
                    errors.append(error)
                else:
                    self._epochs[manifest.job] = manifest.epoch
                    return staged
        tried = "; ".join(map(str, errors)) or _no_transport(manifest)
        kind = UnreadableWeights if all(isinstance(one, UnreadableWeights) for one in errors) else WeightsError
        raise kind(f"cannot stage version {manifest.version} of job '{manifest.job}': {tried}")

    def close(self) -> None:
        """Close every transport."""
        for receiver in self._receivers.values():
            receiver.close()


def open_publisher(
    job: str,
    layout: Layout,
    settings: ServiceSettings,
    *,
    transports: Sequence[Transport] = (),
    memory: DeviceMemory | None = None,
) -> Publisher:
    """Open a publisher of ``job``. If ``settings.bulk_host`` is set, its shared memory is also served over TCP.

    Args:
        transports: default: shm, and disk if ``settings.weight_disk`` is set.
        memory: GPU memory in which versions are also published, for other processes of this host (CUDA IPC).

    Raises:
        ConfigError: an unknown transport, several of which shm is not the first, or disk without its directory.
        Unavailable: shared memory has no room, or the address cannot be bound.
    """
    makers = {"shm": ShmPublisher, "disk": DiskPublisher}
    transports = transports or (("shm",) if settings.weight_disk is None else ("shm", "disk"))
    if tuple(transports) not in {("shm",), ("disk",), ("shm", "disk")}:
        raise ConfigError(f"weight transports are shm, disk, or both in this order, not {list(transports)}")
    slots = ShmReceiver(settings, layout) if len(transports) > 1 else None
    publisher = Publisher([makers[name](job, layout, settings) for name in transports], slots=slots)
    if memory is None:
        return publisher
    return Publisher([CudaIpcPublisher(job, layout, settings, memory, publisher)], (memory.device,), behind=publisher)


def open_receiver(
    settings: ServiceSettings, layout: Layout | None = None, *, memory: DeviceMemory | None = None
) -> Receiver:
    """Open a receiver for any job. It rejects manifests with another layout than ``layout``, the engine's layout (None:
    accept any).

    ``memory``: memory of the engine's GPU, into which the receiver also copies from GPUs of this host (CUDA IPC).

    Raises:
        ConfigError: a file of ``PENSTOCK_BULK_TLS_*`` cannot be used.
    """
    tcp = TcpReceiver(settings, layout, tls=settings.bulk_tls_client)
    member = None
    device = None if memory is None else CudaIpcReceiver(settings, memory, layout)
    receivers: dict[str, WeightReceiver] = {} if device is None else {"cuda_ipc": device}
    receivers["shm"] = ShmReceiver(settings, layout)
    if settings.weight_collective:
        member = CollectiveReceiver(settings.worker_id, layout, kinds=(settings.weight_collective,))
        receivers[settings.weight_collective] = member
    receivers["tcp"] = tcp
    if settings.weight_disk is not None:
        receivers["disk"] = DiskReceiver(settings, layout)
    return Receiver(receivers, member, device)


def cleanup(job: str, settings: ServiceSettings) -> None:
    """Remove slots and weight files of a finished job. Versions in use stay mapped until their engines release them."""
    own, copies = (slot_paths(settings.shm_dir, job, host) for host in ("", settings.host_id))
    turn, devices = turn_path(settings.shm_dir, job, settings.host_id), device_slot_paths(settings.shm_dir, job)
    for path in [*own, *copies, turn, *devices]:
        path.unlink(missing_ok=True)
    remove_files(settings, job)


def _no_transport(manifest: WeightManifest) -> str:
    """Return an error message: why the receiver supports no transport of ``manifest``, and how to change that."""
    ways = ", ".join(f"{ref.transport} on host '{ref.host}'" for ref in manifest.refs) or "nothing"
    return (
        f"the trainer offers {ways}, and this worker can use none of it. For workers of other hosts set "
        "PENSTOCK_BULK_HOST at the trainer (TCP), or PENSTOCK_WEIGHT_DISK at trainer and worker (a shared directory)"
    )
