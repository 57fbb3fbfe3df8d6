"""Tar archives (POSIX.1-2001) that are streamed while their files are read."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.shared.errors import Unavailable

__all__ = ["Member", "tar_bytes", "tar_stream"]

CHUNK_BYTES = 1 << 20
BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Member:
    """A file to archive: ``path`` on disk, and ``name``, its path inside the archive."""

    name: str
    path: Path
    nbytes: int


def tar_bytes(members: Sequence[Member]) -> int:
    """Return the length of the archive in bytes."""
    return sum(len(_header(one, 0)) + _padded(one.nbytes) for one in members) + 2 * BLOCK


async def tar_stream(members: Sequence[Member], *, mtime: int) -> AsyncIterator[bytes]:
    """Yield the bytes of the archive; ``mtime`` (Unix seconds) applies to every file in it.

    Raises:
        Unavailable: a file is gone or has another size; the archive is truncated there.
    """
    for one in members:
        yield _header(one, mtime)
        sent = 0
        try:
            file = await asyncio.to_thread(one.path.open, "rb")
            with file:
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    sent += len(chunk)
                    yield chunk
        except OSError as error:
            raise Unavailable(f"'{one.name}' cannot be read any more: {error}") from None
        if sent != one.nbytes:
            raise Unavailable(f"'{one.name}' has {sent} bytes, not {one.nbytes}")
        yield bytes(_padded(sent) - sent)
    yield bytes(2 * BLOCK)


def _header(one: Member, mtime: int) -> bytes:
    info = tarfile.TarInfo(one.name)
    info.size, info.mtime, info.mode = one.nbytes, mtime, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
