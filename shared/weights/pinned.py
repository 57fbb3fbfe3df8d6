"""Copies of weights from host memory to a GPU through two page-locked buffers, while the GPU computes.

A copy from pageable memory holds up the thread that asks for it. A copy from page-locked memory runs beside other
streams, but it reads the memory at any time until an event behind it has been waited for: so does each copy here before
its buffer is filled again, before its bytes are used, and before the caller releases their source.

``CudaCopyStream`` is the only part that needs a GPU; it has not run on one yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.errors import WeightsError
from penstock.shared.weights.flat import bytes_of

__all__ = ["CopyEvent", "CopyStream", "CudaCopyStream", "PinnedCopies", "pinned_copies"]

BUFFER_BYTES = 16 << 20
"""Size of each of the two buffers; a few megabytes suffice for the full speed of a bus."""
_ALIGN = 16
"""Copies are divided at multiples of this number of bytes, so that each piece can be read as words of 64 bits."""
_CACHED_BYTES = 256 << 10
"""Number of bytes that are written and then summed at a time: few enough to stay in the cache in between."""

Piece = tuple[NDArray[np.uint8], Tensor]
"""Bytes on the host and the memory on the device for them, which is longer by at most ``_ALIGN`` - 1 bytes."""


class CopyEvent(Protocol):
    """A point in a stream's queue of work, such as a CUDA event."""

    def synchronize(self) -> None:
        """Wait until all work that was queued before this event is done."""


class CopyStream(Protocol):
    """Stream of one device. The device does queued work in order and asynchronously. Work is certainly done only once
    the host has waited for an event that was recorded after it.

    Methods may raise RuntimeError: the driver's errors, and lack of memory.
    """

    @property
    def device(self) -> torch.device:
        """Device of the stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory of the host, uint8 [nbytes]."""

    def empty(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return new memory on the device, uint8 [size] for each size. The caller may queue copies to it at once: they
        wait until work that still reads earlier contents of this memory is done."""

    def copy(self, source: Tensor, target: Tensor, total: Tensor) -> None:
        """Queue a copy of ``source`` (page-locked) to ``target``, both uint8 [n × 8], and then the sum of the 64-bit
        words of ``target``, modulo 2^64, into ``total``, int64 []."""

    def record(self) -> CopyEvent:
        """Record an event in the queue behind all work that was queued so far, and return the event without waiting for
        it."""


class CudaCopyStream:
    """A separate stream of a CUDA device for copies. All threads of an engine compute on the default stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> Tensor:
        """See ``CopyStream``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, sizes: Sequence[int]) -> list[Tensor]:
        """See ``CopyStream``. The memory is allocated on the computing stream, which reads it last. If the copying
        stream allocated it, torch could give it to the next copy as soon as it is freed, while the computing stream
        still reads it."""
        found = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return found

    def copy(self, source: Tensor, target: Tensor, total: Tensor) -> None:
        """See ``CopyStream``."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            torch.sum(target.view(torch.int64), 0, out=total)

    def record(self) -> CopyEvent:
        """See ``CopyStream``. Waiting for the event lets the thread sleep instead of polling."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class PinnedCopies:
    """Copies tensors to the device of ``stream``; keeps two page-locked buffers from the first copy on."""

    def __init__(self, stream: CopyStream, buffer_bytes: int = BUFFER_BYTES) -> None:
        assert buffer_bytes % _ALIGN == 0
        self._stream, self._buffer_bytes = stream, buffer_bytes
        self._buffers: list[Tensor] = []
        self._lock = threading.Lock()
        """Held while the buffers are in use."""

    def copy(self, tensors: Mapping[str, Tensor], wanted: Callable[[], bool] = lambda: True) -> dict[str, Tensor]:
        """Copy tensors from host memory to the device. Blocks until the copies are complete and their checksums are
        verified.

        The host sums the words of each piece in the buffer, the device those that arrived; the sums must be equal.
        The tensors are not read any more once this returns or raises.

        Args:
            wanted: called before each piece; if it returns False, the copies end.

        Raises:
            WeightsError: the device failed, has no room or got other bytes, or ``wanted`` returned False.
        """
        with self._lock:
            try:
                return self._copied(tensors, wanted)
            except RuntimeError as error:
                raise WeightsError(f"weights cannot be copied to {self._stream.device}: {error}") from None

    def close(self) -> None:
        """Free the buffers, after the end of a copy in progress."""
        with self._lock:
            self._buffers.clear()

    def _copied(self, tensors: Mapping[str, Tensor], wanted: Callable[[], bool]) -> dict[str, Tensor]:
        sources = [tensor.detach().contiguous() for tensor in tensors.values()]
        targets = self._stream.empty([tensor.nbytes + -tensor.nbytes % _ALIGN for tensor in sources])
        fills = list(_fills([bytes_of(tensor) for tensor in sources], targets, self._buffer_bytes))
        [memory] = self._stream.empty([8 * sum(map(len, fills))])
        arrived = memory.view(torch.int64)
        if not self._buffers:
            self._buffers = [self._stream.pinned(self._buffer_bytes) for _ in range(2)]
        try:
            sent = self._send(fills, arrived, wanted)
        finally:  # also after an error: copies in progress read the buffers and write memory that is freed next
            self._stream.record().synchronize()
        if sent != [total % (1 << 64) for total in arrived.tolist()]:
            raise WeightsError(f"weights arrived damaged on {self._stream.device}")
        return {
            name: target[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for name, tensor, target in zip(tensors, sources, targets, strict=True)
        }

    def _send(self, fills: Sequence[Sequence[Piece]], arrived: Tensor, wanted: Callable[[], bool]) -> list[int]:
        """Queue the copies of all ``fills``, through the two buffers in turn. Return the checksum of each piece,
        computed before the copy. After the copy, the device computes the checksum again and writes it to ``arrived``,
        int64 [pieces]."""
        sent: list[int] = []
        events: list[CopyEvent] = []
        for number, fill in enumerate(fills):
            if not wanted():
                raise WeightsError("the update was given up")
            if number >= 2:
                events[number - 2].synchronize()  # the copies from this buffer
            buffer, start = self._buffers[number % 2], 0
            for source, target in fill:
                room = buffer[start : start + len(target)]
                total = _write(room.numpy(), source)
                self._stream.copy(room, target, arrived[len(sent)])
                sent.append(total)
                start += len(target)
            events.append(self._stream.record())
        return sent


def pinned_copies(device: torch.device) -> PinnedCopies | None:
    """Return the object that copies weights to ``device``; None if ``device`` is not a CUDA device."""
    return PinnedCopies(CudaCopyStream(device)) if device.type == "cuda" else None


def _fills(sources: Sequence[NDArray[np.uint8]], targets: Sequence[Tensor], room: int) -> Iterator[list[Piece]]:
    """Group the copies into fills of a buffer: each fill is a list of pieces ``(source, target)`` with at most ``room``
    bytes in all. A target is as long as its source, rounded up to a multiple of ``_ALIGN``."""
    fill: list[Piece] = []
    left = room
    for source, target in zip(sources, targets, strict=True):
        start = 0
        while start < len(target):
            end = min(start + left, len(target))
            fill.append((source[start:end], target[start:end]))
            left -= end - start
            start = end
            if not left:
                yield fill
                fill, left = [], room
    if fill:
        yield fill


def _write(room: NDArray[np.uint8], source: NDArray[np.uint8]) -> int:
    """Write ``source`` to the beginning of ``room``; return the sum of all 64-bit words of ``room``, modulo 2^64."""
    total = 0
    for start in range(0, len(room), _CACHED_BYTES):
        part = source[start : start + _CACHED_BYTES]
        np.copyto(room[start : start + len(part)], part)
        total += int(room[start : start + _CACHED_BYTES].view(np.uint64).sum())
    return total % (1 << 64)
