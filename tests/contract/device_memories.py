"""Stand-ins for a GPU: files that processes share, a real GPU whose handles one process opens, and late streams."""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.shared.weights.device import CudaMemory, DeviceBuffer, mixed_digest
from penstock.shared.weights.pinned import CopyEvent, CudaCopyStream


class FileMemory:
    """Simulated memory of a device: a file for each allocation, with its name in the handle."""

    def __init__(self, directory: Path, device: str = "GPU-0", peers: tuple[str, ...] = ()) -> None:
        self.directory, self.device, self.reachable = directory, device, (device, *peers)
        self.num_opened = 0
        self.exported: dict[bytes, DeviceBuffer] = {}

    def allocate(self, nbytes: int) -> DeviceBuffer:
        path = self.directory / secrets.token_hex(32)
        path.write_bytes(bytes(nbytes))
        buffer = DeviceBuffer(_mapped(path, nbytes), bytes.fromhex(path.name).ljust(64, b"\0"), path.unlink)
        self.exported[buffer.handle] = buffer
        return buffer

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        path = self.directory / handle[:32].hex()
        if not path.exists():
            raise RuntimeError("invalid resource handle")
        self.num_opened += 1
        return DeviceBuffer(_mapped(path, nbytes), handle, lambda: None)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def digest(self, flat: Tensor) -> str:
        return mixed_digest(flat.numpy())

    def copy(self, source: Tensor, target: Tensor) -> str:
        target.copy_(source)
        return mixed_digest(target.numpy())


class OneProcessCudaMemory(CudaMemory):
    """Memory of a GPU whose handles also open in the process that exported them, which CUDA refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.exported: dict[bytes, DeviceBuffer] = {}

    def allocate(self, nbytes: int) -> DeviceBuffer:
        buffer = super().allocate(nbytes)
        self.exported[buffer.handle] = buffer
        return buffer

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        if (own := self.exported.get(handle)) is None:
            return super().open(handle, nbytes)
        return DeviceBuffer(own.flat, handle, contextlib.nullcontext)


class LateStream:
    """Stream whose work is done as late as CUDA allows: only when an event behind it is waited for.

    Attributes:
        waiting: called at the start of each wait.
        spoil: called with the memory of each copy once it was made.
        most_queued: most copies that were queued at once.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.waiting: Callable[[], None] = lambda: None
        self.spoil: Callable[[Tensor], object] = lambda target: None
        self.num_copies = self.most_queued = self.pinned_bytes = 0
        self._queue: deque[tuple[Tensor, Tensor, Tensor]] = deque()
        self._done = 0

    @property
    def queued(self) -> int:
        """Number of copies that have not been made."""
        return len(self._queue)

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, sizes: Sequence[int]) -> list[Tensor]:
        return [torch.full((size,), 0xA5, dtype=torch.uint8) for size in sizes]

    def copy(self, source: Tensor, target: Tensor, total: Tensor) -> None:
        assert len(source) == len(target)
        self._queue.append((source, target, total))
        self.num_copies += 1
        self.most_queued = max(self.most_queued, len(self._queue))

    def record(self) -> CopyEvent:
        return _Behind(self, self.num_copies)

    def work(self, number: int) -> None:
        """Do the work up to copy ``number``."""
        self.waiting()
        while self._done < number:
            source, target, total = self._queue.popleft()
            target.copy_(source)
            self.spoil(target)
            total.copy_(target.view(torch.int64).sum())
            self._done += 1


class _Behind:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream, self._number = stream, number

    def synchronize(self) -> None:
        self._stream.work(self._number)


class SlowCudaStream(CudaCopyStream):
    """Stream of the GPU on which each copy begins late: some milliseconds after it was queued."""

    def copy(self, source: Tensor, target: Tensor, total: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(5_000_000)  # clock cycles
        super().copy(source, target, total)


def _mapped(path: Path, nbytes: int) -> Tensor:
    return torch.from_numpy(np.memmap(path, np.uint8, "r+", shape=(nbytes,)))
