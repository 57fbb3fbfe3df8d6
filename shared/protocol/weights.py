"""Weight manifests: what a trainer announces and a receiver stages. Opaque references, sizes and digests; no pickle."""

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
"""Transports whose receivers are one group."""
ALIGN = 64
"""Tensors start at multiples of this many bytes inside a slot."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1, "float64": 8}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where one named tensor lies in the flat weight buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True):
    """The table of tensors; ``id`` is the xxh3 of the table, so two processes agree by comparing one string."""

    id: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int


class SlotRef(msgspec.Struct, frozen=True):
    """Opaque handle of the bytes: transport, host, and a path or address that only that transport reads."""

    transport: str
    host: str
    handle: str
    nbytes: int


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A published policy version. ``epoch`` is the trainer's; receivers refuse lower ones.

    ``base`` is the digest of the frozen weights where the tensors are adapters; empty where they are whole weights.
    """

    job: str
    version: int
    epoch: int
    layout: Layout
    digest: str
    """xxh3-128 of the flat buffer, padding included (zeros)."""
    refs: tuple[SlotRef, ...]
    created: float
    base: str = ""


class WeightRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """Transport that the coordinator chose for each worker of a job. ``epoch`` rises with every change."""

    epoch: int
    transports: dict[str, str]

    @property
    def members(self) -> tuple[str, ...]:
        """Workers that take part in broadcasts, in the order of their ranks."""
        return tuple(sorted(worker for worker, transport in self.transports.items() if transport in COLLECTIVES))


def short_digest(digest: str) -> str:
    """The first 64 bits of a weight digest, in hex: enough to tell the weights that have one version number apart."""
    return digest[:16]


def make_layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Lay out ``(name, dtype, shape)`` one after another, aligned; names keep their order."""
    specs, offset = [], 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, nbytes))
        offset += nbytes + (-nbytes % ALIGN)
    table = msgspec.msgpack.encode([(s.name, s.dtype, s.shape, s.offset) for s in specs])
    return Layout(xxhash.xxh3_64_hexdigest(table), tuple(specs), offset)


def slot_name(job: str, number: int, copies_of: str = "") -> str:
    """File name of a slot. ``token`` leaves no dot in its text, so no job's names begin with another's."""
    owner = f"copies-{token(copies_of)}.{token(job)}" if copies_of else f"weights-{token(job)}"
    return f"penstock-{owner}.{number}"
