"""Header page of a weight slot: the version in it, and a counter that is odd while the slot is being written."""

from __future__ import annotations

import os
import struct

import msgspec

from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import Layout, WeightManifest
from penstock.shared.transport.bulk_segment import LockedFile

__all__ = ["SlotHeader", "read_slot", "sequence_of", "write_slot"]

_MAGIC = b"PSWSLOT1"
_FORMAT = struct.Struct("<8sQQQQ16s32s")
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_OFFSET = 8


class SlotHeader(msgspec.Struct, frozen=True):
    """Header of a slot. Each write increases ``sequence``: it is odd during the write, and even once the content is
    complete."""

    sequence: int = 0
    version: int = 0
    epoch: int = 0
    nbytes: int = 0
    layout: str = ""
    digest: str = ""

    @property
    def sealed(self) -> bool:
        """True if the slot holds a complete version."""
        return self.sequence > 0 and self.sequence % 2 == 0

    def digest_in(self, layout: Layout) -> str:
        """Return the digest of the version if it is complete and has this layout, else ''."""
        return self.digest if self.sealed and (self.layout, self.nbytes) == (layout.id, layout.nbytes) else ""

    def mismatch(self, manifest: WeightManifest) -> str:
        """Return a text that says how the slot differs from the version of ``manifest``; '' if the slot holds exactly
        this version."""
        if not self.sealed:
            return "it is being written, or its writer died"
        wanted = (manifest.version, manifest.epoch, manifest.layout.nbytes, manifest.layout.id, manifest.digest)
        if (self.version, self.epoch, self.nbytes, self.layout, self.digest) != wanted:
            return f"it holds version {self.version} of epoch {self.epoch} ({self.layout}, {self.digest[:8]})"
        return ""


def write_slot(file: LockedFile, header: SlotHeader) -> None:
    """Write ``header`` to a slot."""
    names = header.layout.encode(), header.digest.encode()
    numbers = header.sequence, header.version, header.epoch, header.nbytes
    os.pwrite(file.fd, _FORMAT.pack(_MAGIC, *numbers, *names), 0)


def read_slot(file: LockedFile) -> SlotHeader:
    """Return the header of a slot.

    Raises:
        WeightsError: the file is not a weight slot.
    """
    data = os.pread(file.fd, _FORMAT.size, 0)
    if len(data) < _FORMAT.size or not data.startswith(_MAGIC):
        raise WeightsError(f"{file.path} is not a weight slot")
    _, sequence, version, epoch, nbytes, layout, digest = _FORMAT.unpack(data)
    return SlotHeader(sequence, version, epoch, nbytes, layout.rstrip(b"\0").decode(), digest.rstrip(b"\0").decode())


def sequence_of(header_page: memoryview) -> int:
    """Return the sequence counter of a mapped slot."""
    sequence: int = _SEQUENCE.unpack_from(header_page, _SEQUENCE_OFFSET)[0]
    return sequence
