"""The header page of a bulk segment, read and written through the file so that no mapping is needed."""

from __future__ import annotations

import os
import re
import struct

import msgspec

from penstock.shared.errors import NotFound
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile

__all__ = ["PREFIX", "SEGMENT_NAME", "BulkHeader", "lock_content", "read_header", "write_header"]

PREFIX = "penstock-bulk-"
"""File names of bulk segments start with this."""
SEGMENT_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{16}-[0-9]{1,12}")
"""Form of the name in a claim."""
_MAGIC = b"PSBULK01"
_FORMAT = struct.Struct("<8sQQQQ")
_TAKEN = struct.Struct("<Q")
_TAKEN_OFFSET = 24


class BulkHeader(msgspec.Struct, frozen=True):
    """Content of a segment: number ``generation`` (0: none) of ``nbytes`` bytes.

    ``single_use``: free once ``taken`` equals ``generation`` (a consumer locked it) and nobody holds a lock any more.
    """

    generation: int = 0
    nbytes: int = 0
    taken: int = 0
    single_use: bool = False


def write_header(file: LockedFile, header: BulkHeader) -> None:
    """Store ``header``."""
    packed = _FORMAT.pack(_MAGIC, header.generation, header.nbytes, header.taken, header.single_use)
    os.pwrite(file.fd, packed, 0)


def read_header(file: LockedFile) -> BulkHeader:
    """The header.

    Raises:
        NotFound: not a bulk segment, or cut short.
    """
    data = os.pread(file.fd, _FORMAT.size, 0)
    if len(data) < _FORMAT.size or not data.startswith(_MAGIC):
        raise NotFound(f"{file.path} is not a bulk segment")
    _, generation, nbytes, taken, single_use = _FORMAT.unpack(data)
    if DATA_OFFSET + nbytes > os.fstat(file.fd).st_size:
        raise NotFound(f"{file.path} is shorter than the {nbytes} bytes it should hold")
    return BulkHeader(generation, nbytes, taken, bool(single_use))


def lock_content(file: LockedFile, generation: int) -> BulkHeader:
    """Take the reader's lock on content ``generation``; a single-use content counts as taken from now on.

    Raises:
        NotFound: the segment holds something else by now.
    """
    if not file.try_shared():
        raise NotFound(f"{file.path.name} is being written anew, its content {generation} is gone")
    header = read_header(file)
    if header.generation != generation:
        file.unlock()
        raise NotFound(f"{file.path.name} holds content {header.generation}, content {generation} was released")
    if header.single_use:
        os.pwrite(file.fd, _TAKEN.pack(generation), _TAKEN_OFFSET)  # this field only: the producer may write the others
    return header
