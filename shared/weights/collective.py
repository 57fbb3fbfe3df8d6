"""Weights by a collective broadcast: the publisher sends each bucket once, and the members of a group forward it.

A group belongs to one membership, numbered by the coordinator; a worker that joins or leaves changes the membership.
Before each version all members report to the publisher: if one is missing, or is lost during the broadcast, no member
stages anything from it, the group is closed, and the receivers use another transport. Every wait has a deadline. As
with every transport, the received bytes are verified against the manifest, so that a broken broadcast never becomes a
version.

The connections are neither encrypted nor authenticated: for networks where every host is trusted.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.shared.errors import NotFound, UnreadableWeights, WeightsError
from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest
from penstock.shared.weights.base import Way
from penstock.shared.weights.flat import check_layout
from penstock.shared.weights.local import BufferPool, LocalStaged

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["CollectivePublisher", "CollectiveReceiver", "Kind"]

logger = logging.getLogger(__name__)

Kind = Literal["gloo", "nccl"]

BUCKET_BYTES = 32 << 20
IN_FLIGHT = 2
"""Number of buckets in flight."""
MEET_S = 5.0
"""Timeout for all members to report (seconds)."""
STANDSTILL_S = 10.0
"""Timeout of one bucket (seconds)."""
AGAIN_S = 30.0
"""Time after which a broken group is built again, if its members have not changed (seconds)."""

Source = Callable[[], AbstractContextManager[NDArray[np.uint8]]]
"""Opens the bytes of a version, which stay constant inside the ``with`` block."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """Address of a broadcast: its transport (``kind``), and the parsed ``handle`` of its ``SlotRef``."""

    kind: str
    host: str
    port: int
    epoch: int
    group: int
    number: int

    @property
    def handle(self) -> str:
        return f"{self.host}:{self.port}/{self.epoch}/{self.group}/{self.number}"

    @classmethod
    def read(cls, ref: SlotRef) -> _Offer:
        """Parse a reference. Raises WeightsError if its handle is not the handle of a broadcast."""
        address, *numbers = ref.handle.split("/")
        host, _, port = address.rpartition(":")
        if len(numbers) != 3 or not all(text.isdecimal() for text in (port, *numbers)):
            raise WeightsError(f"'{ref.handle}' is no handle of a broadcast")
        return cls(ref.transport, host, int(port), *map(int, numbers))

    def key(self, what: str) -> str:
        return f"{self.epoch}.{self.group}/{self.number}/{what}"


class _Group:
    """Process group of the publisher and all members, in which this process is one rank."""

    def __init__(self, kind: Kind, store: Store, rank: int, size: int, *, address: str) -> None:
        """Connect to the other ranks.

        Raises:
            RuntimeError: not all members connected in time.
        """
        self.rank, self.kind = rank, kind
        self.device = torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu")
        if kind == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=STANDSTILL_S)
            self._handle: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout, options._threads = timedelta(seconds=MEET_S), 2
            self._handle = gloo(store, rank, size, options)

    def broadcast(self, data: NDArray[np.uint8]) -> None:
        """Rank 0: send ``data`` bucket by bucket. Other ranks: receive into ``data``.

        Raises:
            RuntimeError: a member was lost, or a bucket took longer than ``STANDSTILL_S``.
        """
        flat, works = torch.from_numpy(data), deque[tuple[Any, Tensor, Tensor]]()
        for start in range(0, len(flat), BUCKET_BYTES):
            host = flat[start : start + BUCKET_BYTES]
            bucket = host.to(self.device, copy=self.rank == 0) if self.kind == "nccl" else host
            works.append((self._begin(bucket), bucket, host))
            if len(works) == IN_FLIGHT:
                self._end(*works.popleft())
        while works:
            self._end(*works.popleft())

    def close(self) -> None:
        """Close the connections, even during a blocked broadcast."""
        with contextlib.suppress(RuntimeError, AttributeError):
            self._handle.abort() if self.kind == "nccl" else self._handle.shutdown()
        self._handle = None

    def _begin(self, bucket: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=STANDSTILL_S)
        return self._handle.broadcast([bucket], options)

    def _end(self, work: Any, bucket: Tensor, host: Tensor) -> None:
        work.wait(timedelta(seconds=STANDSTILL_S))
        if self.kind == "nccl" and self.rank:
            host.copy_(bucket)


class CollectivePublisher:
    """Broadcasts versions from a slot to the members of the current group, in a thread that runs while training
    continues.

    Args:
        host: address by which the members reach this process.
    """

    def __init__(self, host: str, kind: Kind = "gloo") -> None:
        self._host, self._kind = host, kind
        self._store = TCPStore(
            host, 0, None, True, timedelta(seconds=MEET_S), wait_for_workers=False, multi_tenant=True
        )
        self._layout: Layout | None = None
        self._members: tuple[str, ...] = ()
        self._epoch = self._tries = self._number = 0
        self._group: _Group | None = None
        self._rests_until = 0.0
        self._thread: threading.Thread | None = None

    def open(self, layout: Layout, members: Sequence[str], epoch: int) -> None:
        """Send versions of ``layout`` to ``members`` from now on; the next version creates the group.

        A broken group is not rebuilt until ``epoch`` rises or ``AGAIN_S`` have passed.
        """
        if (tuple(members), epoch, layout) == (self._members, self._epoch, self._layout):
            return
        self._end_group()
        self._layout, self._members, self._epoch, self._rests_until = layout, tuple(members), epoch, 0.0

    def offer(self, source: Source) -> SlotRef | None:
        """Start to broadcast a version and return its reference. Return None if there are no members, if the previous
        broadcast still runs, or if the group broke less than ``AGAIN_S`` ago."""
        if not self._members or self._layout is None or time.monotonic() < self._rests_until:
            return None
        if self._thread is not None and self._thread.is_alive():  # the last broadcast is running: use another transport
            return None
        self._number += 1
        offer = _Offer(self._kind, self._host, self._store.port, self._epoch, self._tries, self._number)
        self._thread = threading.Thread(target=self._run, args=(offer, source), name="weights-broadcast", daemon=True)
        self._thread.start()
        return SlotRef(self._kind, self._host, offer.handle, self._layout.nbytes)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the current broadcast; return False if it is still running, or if it failed."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return time.monotonic() >= self._rests_until and (self._thread is None or not self._thread.is_alive())

    def close(self) -> None:
        """Close the group; a current broadcast fails for all members."""
        self._members = ()
        self._end_group()

    def _run(self, offer: _Offer, source: Source) -> None:
        try:
            self._meet(offer)
            with source() as data:
                if self._group is None:
                    prefix = PrefixStore(f"{offer.epoch}.{offer.group}/mesh", self._store)
                    size = len(self._members) + 1
                    self._group = _Group(self._kind, prefix, 0, size, address=self._host)
                self._group.broadcast(data)
        except (RuntimeError, NotFound, OSError, WeightsError) as error:
            logger.warning("the broadcast of weights to %s broke: %s", ", ".join(self._members), _line(error))
            self._rests_until = time.monotonic() + AGAIN_S
            self._end_group()

    def _meet(self, offer: _Offer) -> None:
        """Wait until all members have reported. Then tell them that the broadcast begins, or that a member is missing.

        Raises:
            WeightsError: a member is missing.
        """
        deadline = time.monotonic() + MEET_S
        missing = list(self._members)
        while missing and time.monotonic() < deadline:
            missing = [name for name in missing if not self._store.check([offer.key(f"there/{name}")])]
            time.sleep(0.002 if missing else 0)
        self._store.set(offer.key("go"), f"without {missing[0]}" if missing else "go")
        if missing:
            raise WeightsError(f"{', '.join(missing)} did not come within {MEET_S:g} s")

    def _end_group(self) -> None:
        group, self._group = self._group, None
        self._tries += 1
        if group is not None:
            group.close()


class CollectiveReceiver:
    """Group member that receives broadcast versions into private memory.

    Args:
        name: name by which the coordinator knows this member.
    """

    def __init__(self, name: str, layout: Layout | None = None, *, kinds: Sequence[Kind] = ("gloo",)) -> None:
        self._name, self._layout, self._kinds = name, layout, tuple(kinds)
        self._members: tuple[str, ...] = ()
        self._epoch = -1
        self._group: _Group | None = None
        self._of: tuple[str, int, int, int] | None = None
        self._store: TCPStore | None = None
        self._pool = BufferPool()

    def join(self, members: Sequence[str], epoch: int) -> None:
        """Set the names of the current members; this process may be absent."""
        self._members, self._epoch = tuple(members), epoch

    def accepts(self, ref: SlotRef) -> bool:
        """Return True for a broadcast to the current members, if they include this process."""
        if ref.transport not in self._kinds or self._name not in self._members:
            return False
        return _Offer.read(ref).epoch == self._epoch

    def stage(self, manifest: WeightManifest) -> LocalStaged:
        """Receive the version by taking part in its broadcast, verify its bytes, and return it.

        Raises:
            UnreadableWeights: members are missing, or one was lost; nothing is held. TCP has the same bytes.
            WeightsError: the received bytes are damaged.
        """
        ref = next((ref for ref in manifest.refs if self.accepts(ref)), None)
        if ref is None:
            raise WeightsError(f"version {manifest.version} is not broadcast to '{self._name}'")
        layout, offer = check_layout(manifest.layout, self._layout), _Offer.read(ref)
        buffer = self._pool.take(layout.nbytes)
        try:
            self._enter(offer).broadcast(buffer)
        except (RuntimeError, WeightsError) as error:  # not reused: a receive may still write to buffer
            self._leave()
            raise UnreadableWeights(f"version {manifest.version} by {offer.kind}: {_line(error)}") from None
        return LocalStaged(manifest, buffer, layout, self._pool, Way(offer.kind, layout.nbytes))

    def close(self) -> None:
        """Leave the group."""
        self._leave()
        self._pool.clear()

    def _enter(self, offer: _Offer) -> _Group:
        """Report this member to the publisher, connect to the other members, and return the group."""
        of = (offer.host, offer.port, offer.epoch, offer.group)
        if self._of != of:
            self._leave()
        wait = timedelta(seconds=MEET_S)
        if self._store is None:
            self._store = TCPStore(offer.host, offer.port, None, False, wait, wait_for_workers=False)
            self._of = of
        self._store.set(offer.key(f"there/{self._name}"), "")
        self._store.wait([offer.key("go")], wait)
        answer = self._store.get(offer.key("go")).decode()
        if answer != "go":
            raise WeightsError(f"the broadcast is off: {answer}")
        if self._group is None:
            prefix = PrefixStore(f"{offer.epoch}.{offer.group}/mesh", self._store)
            rank, size = self._members.index(self._name) + 1, len(self._members) + 1
            self._group = _Group(offer.kind, prefix, rank, size, address=_own_address(offer.host))  # type: ignore[arg-type]
        return self._group

    def _leave(self) -> None:
        group, self._group, self._store, self._of = self._group, None, None, None
        if group is not None:
            group.close()


def _own_address(peer: str) -> str:
    """Return the address by which this host reaches ``peer``."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _line(error: Exception) -> str:
    """Return the first line of an error message; messages of torch continue with a C++ stack."""
    return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
