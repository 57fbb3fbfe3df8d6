"""Header page of a bulk segment. It is read and written through the file, so that a process need not map the
segment."""

from __future__ import annotations

import os
import re
import struct

import msgspec

from penstock.shared.errors import NotFound
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile

__all__ = ["PREFIX", "SEGMENT_NAME", "BulkHeader", "lock_content", "read_header", "write_header"]

PREFIX = "penstock-bulk-"
"""Prefix of the file names of bulk segments."""
SEGMENT_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{16}-[0-9]{1,12}")
"""Pattern that the name of a segment in a claim must match."""
_MAGIC = b"PSBULK01"
_FORMAT = struct.Struct("<8sQQQQ")
_TAKEN = struct.Struct("<Q")
_TAKEN_OFFSET = 24


class BulkHeader(msgspec.Struct, frozen=True):
    """Header of a segment that holds ``nbytes`` bytes. ``generation`` counts the contents that the segment has had so
    far (0: no content yet).

    With ``single_use`` the store may reuse the segment once ``taken`` equals ``generation`` and no process holds a
    lock. A consumer sets ``taken`` when it locks the content.
    """

    generation: int = 0
    nbytes: int = 0
    taken: int = 0
    single_use: bool = False


def write_header(file: LockedFile, header: BulkHeader) -> None:
    """Write ``header`` to a segment."""
    packed = _FORMAT.pack(_MAGIC, header.generation, header.nbytes, header.taken, header.single_use)
    os.pwrite(file.fd, packed, 0)


def read_header(file: LockedFile) -> BulkHeader:
    """Return the header of a segment.

    Raises:
        NotFound: the file is not a bulk segment, or is truncated.
    """
    data = os.pread(file.fd, _FORMAT.size, 0)
    if len(data) < _FORMAT.size or not data.startswith(_MAGIC):
        raise NotFound(f"{file.path} is not a bulk segment")
    _, generation, nbytes, taken, single_use = _FORMAT.unpack(data)
    if DATA_OFFSET + nbytes > os.fstat(file.fd).st_size:
        raise NotFound(f"{file.path} is shorter than the {nbytes} bytes it should hold")
    return BulkHeader(generation, nbytes, taken, bool(single_use))


def lock_content(file: LockedFile, generation: int) -> BulkHeader:
    """Take a reader's lock on content number ``generation``, mark the content as taken if it is single-use, and return
    the header.

    Raises:
        NotFound: the segment has another content by now.
    """
    if not file.try_shared():
        raise NotFound(f"{file.path.name} is being written anew, its content {generation} is gone")
    header = read_header(file)
    if header.generation != generation:
        file.unlock()
        raise NotFound(f"{file.path.name} holds content {header.generation}, content {generation} was released")
    if header.single_use:
        os.pwrite(file.fd, _TAKEN.pack(generation), _TAKEN_OFFSET)  # only this field: the producer writes the others
    return header
