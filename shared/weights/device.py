"""GPU memory that other processes of the host can open, and a digest that GPU and CPU compute to the same value.

``CudaMemory`` is the only part of the transport ``cuda_ipc`` that needs a GPU; it has not run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable

__all__ = ["CudaMemory", "DeviceBuffer", "DeviceMemory", "device_memory", "mixed_digest"]

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK_WORDS = 1 << 15  # fits into a cache
_BLOCKS, _THREADS = 1024, 256
_GRANULARITY_BYTES = 2 << 20  # smaller allocations share a block of the driver, and a handle opens the whole block

_SOURCE = """
__device__ void add(unsigned long long word, unsigned long long number, unsigned long long* sums)
{
    word += (number + 1) * 0x9E3779B97F4A7C15ULL;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
    word ^= word >> 31;
    sums[0] += word;
    sums[1] += word * (2 * number + 1);
}

extern "C" __global__ void copy_and_sum(
    const ulonglong2* source, ulonglong2* target, unsigned long long num_pairs, int copies, unsigned long long* total)
{
    unsigned long long sums[2] = {0, 0};
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long pair = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; pair < num_pairs; pair += step) {
        const ulonglong2 words = source[pair];
        if (copies) target[pair] = words;
        add(words.x, 2 * pair, sums);
        add(words.y, 2 * pair + 1, sums);
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        sums[0] += __shfl_down_sync(0xffffffffu, sums[0], lane);
        sums[1] += __shfl_down_sync(0xffffffffu, sums[1], lane);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(total, sums[0]);
        atomicAdd(total + 1, sums[1]);
    }
}
"""


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Bytes on a device: ``flat``, uint8 [nbytes], is invalid after ``close``. Other processes open the bytes by
    ``handle``."""

    flat: Tensor
    handle: bytes
    close: Callable[[], None]


class DeviceMemory(Protocol):
    """Memory of one device. A method whose docstring names no errors may raise any error of the driver and its
    libraries."""

    @property
    def device(self) -> str:
        """Unique id of the device."""

    @property
    def reachable(self) -> tuple[str, ...]:
        """Unique ids of the devices whose memory this device can read, including its own."""

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Allocate memory that other processes can open. Raises Unavailable if there is no room, or if the memory
        cannot be exported."""

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        """Map memory that another living process allocated. The call is slow, so keep the result."""

    def empty(self, nbytes: int) -> Tensor:
        """Return private memory, uint8 [nbytes], with undefined content."""

    def digest(self, flat: Tensor) -> str:
        """Return ``mixed_digest`` of ``flat``, once all earlier work on the current stream has been done."""

    def copy(self, source: Tensor, target: Tensor) -> str:
        """Copy ``source`` to ``target``; return ``mixed_digest`` of the copied bytes, once the copy is complete."""


def mixed_digest(data: NDArray[np.uint8]) -> str:
    """Return the digest of ``data``, uint8 [n × 16]: two sums over all words, which a GPU can compute in parallel.

    Word i of 64 bits becomes z = splitmix64(word + (i + 1) × 0x9E3779B97F4A7C15) (Steele et al., 2014). The digest is
    ``mix1-``, the sum of all z and the sum of all z × (2i + 1), modulo 2^64, in hex. It finds damage, not attacks.
    """
    words = data.view(np.uint64)
    sums = np.zeros(2, np.uint64)
    for start in range(0, len(words), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        number = np.arange(start, start + len(part), dtype=np.uint64)
        mixed = part + (number + np.uint64(1)) * np.uint64(_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        mixed ^= mixed >> np.uint64(31)
        sums += np.stack([mixed.sum(dtype=np.uint64), (mixed * (number * np.uint64(2) + np.uint64(1))).sum()])
    return _tagged(sums)


class CudaMemory:
    """Memory of the current CUDA device, from cudaMalloc: torch's allocator may use memory that cannot be exported.

    Raises:
        ConfigError: torch finds no CUDA device, cupy is missing, or the kernel does not run.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("PENSTOCK_WEIGHT_CUDA_IPC is set, but torch finds no CUDA device")
        try:
            import cupy
        except ImportError as error:
            raise ConfigError(f"PENSTOCK_WEIGHT_CUDA_IPC needs cupy: pip install 'penstock[cuda]' ({error})") from None
        self._cupy, self._index = cupy, torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        self._kernel = cupy.RawKernel(_SOURCE, "copy_and_sum")
        self.device = _uuid(self._index)
        others = [other for other in range(torch.cuda.device_count()) if other != self._index]
        peers = [other for other in others if torch.cuda.can_device_access_peer(self._index, other)]
        self.reachable = (self.device, *map(_uuid, peers))
        self._try()

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """See ``DeviceMemory``."""
        runtime = self._cupy.cuda.runtime
        with torch.cuda.device(self._index):
            torch.cuda.empty_cache()
            address = 0
            try:
                address = runtime.malloc(nbytes + -nbytes % _GRANULARITY_BYTES)
                handle = bytes(runtime.ipcGetMemHandle(address))
                flat = self._view(address, nbytes)
            except Exception as error:  # a RuntimeError of the driver, a MemoryError of cupy, and others
                runtime.free(address)  # nothing happens at 0
                raise Unavailable(f"GPU {self.device} cannot export {nbytes} bytes: {error}") from None
            return DeviceBuffer(flat, handle, partial(runtime.free, address))

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        """See ``DeviceMemory``."""
        runtime = self._cupy.cuda.runtime
        with torch.cuda.device(self._index):
            address = runtime.ipcOpenMemHandle(handle)  # enables access to a peer
            return DeviceBuffer(self._view(address, nbytes), handle, partial(runtime.ipcCloseMemHandle, address))

    def empty(self, nbytes: int) -> Tensor:
        """See ``DeviceMemory``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def digest(self, flat: Tensor) -> str:
        """See ``DeviceMemory``."""
        return self._run(flat, flat, torch.cuda.current_stream(self._index), copies=False)

    def copy(self, source: Tensor, target: Tensor) -> str:
        """See ``DeviceMemory``. Uses a stream of its own, so that the engine continues meanwhile."""
        self._stream.wait_stream(torch.cuda.current_stream(self._index))  # target may be memory that was just freed
        return self._run(source, target, self._stream, copies=True)

    def _try(self) -> None:
        """Compile the kernel and run it once. Raises ConfigError if that fails."""
        try:
            digest = self.copy(self.empty(16).zero_(), self.empty(16))
        except Exception as error:  # of the driver, its compiler, or an allocator: they share no class
            raise ConfigError(f"PENSTOCK_WEIGHT_CUDA_IPC: GPU {self.device} cannot run its kernel: {error}") from None
        if digest != mixed_digest(np.zeros(16, np.uint8)):
            raise ConfigError(f"PENSTOCK_WEIGHT_CUDA_IPC: the kernel computes {digest} on GPU {self.device}")

    def _run(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream, *, copies: bool) -> str:
        cupy = self._cupy
        with torch.cuda.device(self._index), torch.cuda.stream(stream), cupy.cuda.Stream.from_external(stream):
            total = torch.zeros(2, dtype=torch.int64, device=target.device)
            pointers = np.uint64(source.data_ptr()), np.uint64(target.data_ptr())
            numbers = np.uint64(source.nbytes // 16), np.int32(copies)
            self._kernel((_BLOCKS,), (_THREADS,), (*pointers, *numbers, np.uint64(total.data_ptr())))
            sums = total.cpu()  # waits for the kernel
        return _tagged(sums.numpy().view(np.uint64))

    def _view(self, address: int, nbytes: int) -> Tensor:
        cupy = self._cupy
        memory = cupy.cuda.UnownedMemory(address, nbytes, None, self._index)
        array: Any = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        return from_dlpack(array)


def device_memory(settings: ServiceSettings) -> CudaMemory | None:
    """Return a ``CudaMemory`` of the current GPU, or None if ``settings.weight_cuda_ipc`` is off.

    Raises:
        ConfigError: the setting is on, but this process cannot use CUDA or cupy; see ``CudaMemory``.
    """
    return CudaMemory() if settings.weight_cuda_ipc else None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _tagged(sums: NDArray[np.uint64]) -> str:
    first, second = sums.tolist()
    return f"mix1-{first:016x}{second:016x}"
