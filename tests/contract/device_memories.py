"""Stand-ins for the memory of a GPU: files that processes share, and a real GPU whose handles one process opens."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.shared.weights.device import CudaMemory, DeviceBuffer, mixed_digest


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


def _mapped(path: Path, nbytes: int) -> Tensor:
    return torch.from_numpy(np.memmap(path, np.uint8, "r+", shape=(nbytes,)))
