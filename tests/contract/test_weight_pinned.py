"""Copies through page-locked buffers: the bytes are right although the stream makes each copy as late as it may."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.shared.errors import WeightsError
from penstock.shared.weights.pinned import PinnedCopies, pinned_copies
from tests.contract.device_memories import LateStream, SlowCudaStream

BUFFER_BYTES = 4096


def late() -> LateStream:
    return LateStream()


def slow() -> SlowCudaStream:
    return SlowCudaStream(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture(params=[late, pytest.param(slow, marks=pytest.mark.gpu)])
def copies(request: pytest.FixtureRequest) -> PinnedCopies:
    return PinnedCopies(request.param(), BUFFER_BYTES)


@pytest.fixture
def stream() -> LateStream:
    return LateStream()


def weights(seed: int) -> dict[str, Tensor]:
    """Return tensors of many sizes: empty, odd, one buffer exactly, many buffers; of several dtypes, one transposed."""
    numbers = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers)

    return {
        "one": of(1), "empty": of(0, 3), "odd": of(17).bfloat16(), "mask": of(13) > 0, "scalar": of(),
        "buffer": of(BUFFER_BYTES // 4), "many": of(70, 61), "turned": of(40, 30).T, "double": of(5).double(),
        "bytes": torch.randint(0, 256, (3 * BUFFER_BYTES + 5,), dtype=torch.uint8, generator=numbers),
        "narrow": of(33, 129).bfloat16(), "last": of(3),
    }  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_bit_arrives(copies: PinnedCopies) -> None:
    for seed in range(3):
        sent = weights(seed)
        arrived = copies.copy(sent)
        assert list(arrived) == list(sent)
        for name, tensor in sent.items():
            assert (arrived[name].shape, arrived[name].dtype) == (tensor.shape, tensor.dtype), name
            assert bits(arrived[name]) == bits(tensor), name


def test_what_arrived_stays_when_the_source_changes(copies: PinnedCopies) -> None:
    sent = weights(0)
    before = {name: bits(tensor) for name, tensor in sent.items()}
    arrived = copies.copy(sent)
    for tensor in sent.values():
        tensor.zero_()
    copies.copy(weights(1))
    assert {name: bits(tensor) for name, tensor in arrived.items()} == before


def test_nothing_is_copied_of_nothing(copies: PinnedCopies) -> None:
    assert copies.copy({}) == {}
    assert copies.copy({"empty": torch.empty(0)})["empty"].numel() == 0


def test_one_buffer_is_filled_while_the_other_is_copied(stream: LateStream) -> None:
    """The first wait comes when both buffers are full; afterwards each wait is for one of them."""
    queued: list[int] = []
    stream.waiting = lambda: queued.append(stream.queued)
    PinnedCopies(stream, BUFFER_BYTES).copy({"w": torch.randn(5 * BUFFER_BYTES // 4)})
    assert queued == [2, 2, 2, 2], "three refills and the end"
    assert (stream.most_queued, stream.queued, stream.num_copies) == (2, 0, 5)


def test_host_memory_is_bounded_and_kept(stream: LateStream) -> None:
    copies = PinnedCopies(stream, BUFFER_BYTES)
    assert stream.pinned_bytes == 0
    for seed in range(3):
        copies.copy(weights(seed))
    assert stream.pinned_bytes == 2 * BUFFER_BYTES
    copies.close()
    copies.copy(weights(3))
    assert stream.pinned_bytes == 4 * BUFFER_BYTES


@pytest.mark.parametrize("number", [1, 3, 9])
def test_damaged_bytes_are_found(stream: LateStream, number: int) -> None:
    def flip(target: Tensor) -> None:
        nonlocal number
        number -= 1
        if not number:
            target[target.numel() // 2] ^= 4

    stream.spoil = flip
    copies = PinnedCopies(stream, BUFFER_BYTES)
    with pytest.raises(WeightsError, match="damaged"):
        copies.copy(weights(0))
    assert bits(copies.copy(weights(1))["many"]) == bits(weights(1)["many"])


@pytest.mark.parametrize("end", ["unwanted", "failed"])
def test_copies_that_end_early_leave_none_queued(stream: LateStream, end: str) -> None:
    """A queued copy would read a buffer that the next one fills, and write memory that is free."""
    copies = PinnedCopies(stream, BUFFER_BYTES)
    asked = 0

    def wanted() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2 and end == "failed":
            raise RuntimeError("CUDA error: out of memory")
        return asked < 2

    with pytest.raises(WeightsError, match="given up" if end == "unwanted" else "cpu: CUDA error: out of memory"):
        copies.copy(weights(0), wanted)
    assert (stream.num_copies > 0, stream.queued) == (True, 0)
    assert bits(copies.copy(weights(1))["many"]) == bits(weights(1)["many"])


def test_only_a_gpu_needs_copies() -> None:
    assert pinned_copies(torch.device("cpu")) is None
