"""Weight manifests. A trainer announces one for each version; receivers load the version that it describes. A manifest
contains opaque references, sizes and digests, and no pickle."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import msgspec
import xxhash

from penstock.shared.protocol.subjects import token

__all__ = [
    "ALIGN",
    "COLLECTIVES",
    "Layout",
    "SlotRef",
    "TensorSpec",
    "WeightManifest",
    "WeightRoutes",
    "make_layout",
    "short_digest",
    "slot_name",
]

COLLECTIVES = ("gloo", "nccl")
"""Transports by which the trainer broadcasts weights to all receivers as one group of ranks."""
ALIGN = 64
"""Alignment of tensors in a slot (bytes)."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1, "float64": 8}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Position of one named tensor in the flat weight buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True):
    """Table of tensors; ``id`` is its xxh3, so that two processes can compare layouts by one string."""

    id: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int


class SlotRef(msgspec.Struct, frozen=True):
    """Reference to the bytes of a version: the transport, the publisher's host, and ``handle``, a path or address that
    the transport understands."""

    transport: str
    host: str
    handle: str
    nbytes: int


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Published policy version. ``epoch`` is the epoch of the trainer's lease; receivers reject manifests with an epoch
    lower than one they have seen.

    ``base`` is the digest of the frozen weights if the tensors are adapters; empty if they are whole weights.
    """

    job: str
    version: int
    epoch: int
    layout: Layout
    digest: str
    """xxh3-128 of the flat buffer, including padding (zeros)."""
    refs: tuple[SlotRef, ...]
    created: float
    base: str = ""


class WeightRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """Weight transport that the coordinator chose for each worker of a job. ``epoch`` rises with every change."""

    epoch: int
    transports: dict[str, str]

    @property
    def members(self) -> tuple[str, ...]:
        """Workers that receive broadcasts, in the order of their ranks."""
        return tuple(sorted(worker for worker, transport in self.transports.items() if transport in COLLECTIVES))


def short_digest(digest: str) -> str:
    """Return the first 64 bits of a weight digest, in hex: enough to distinguish weights with the same version
    number."""
    return digest[:16]


def make_layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Return the layout of tensors ``(name, dtype, shape)``: consecutive, aligned, and in the given order."""
    specs, offset = [], 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, nbytes))
        offset += nbytes + (-nbytes % ALIGN)
    table = msgspec.msgpack.encode([(s.name, s.dtype, s.shape, s.offset) for s in specs])
    return Layout(xxhash.xxh3_64_hexdigest(table), tuple(specs), offset)


def slot_name(job: str, number: int, copies_of: str = "") -> str:
    """Return the file name of a slot, a file that holds the weights of one version.

    ``copies_of`` is the id of the host whose fetched copy is in the slot; '': the slot of a publisher. ``token``
    escapes dots, so that no job's names are a prefix of another job's.
    """
    owner = f"copies-{token(copies_of)}.{token(job)}" if copies_of else f"weights-{token(job)}"
    return f"penstock-{owner}.{number}"
