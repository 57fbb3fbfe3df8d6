"""Segments: files on tmpfs, guarded by kernel locks, that several processes of one host map into their memory.

A lock is an ``flock`` of an open file: the kernel releases it when its holder unlocks, closes or dies, and never
otherwise; a stopped process keeps it. So a segment whose exclusive lock can be taken has no reader, independent of any
clock. (A forked child shares the locks of its parent; children started with exec do not, because descriptors are closed
there.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import NotFound, Unavailable

__all__ = ["DATA_OFFSET", "Access", "LockedFile", "Owner", "Segment", "map_file", "remove_unheld", "sweep"]

DATA_OFFSET = 4096
"""Data starts on the second page; the first one is the header."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; the mmap module does not define them
_PIECE = 64 << 20
"""Bytes that are reserved or mapped between two reports of progress."""

Access = Literal["write", "read", "private"]
"""Mode of a mapping: shared and writable, read-only, or private copy-on-write."""


class LockedFile:
    """Open file with its own kernel lock. Two objects for the same file exclude each other, even in one process."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing file.

        Raises:
            NotFound: the file does not exist.
            Unavailable: the file cannot be opened.
        """
        try:
            return cls(path, os.open(path, os.O_RDWR))
        except FileNotFoundError:
            raise NotFound(f"there is no segment {path}") from None
        except OSError as error:
            raise Unavailable(f"cannot open segment {path} (do both processes run as one user?): {error}") from None

    def try_exclusive(self) -> bool:
        """Take the exclusive lock; return False if another holder has a lock."""
        return self._try_lock(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Take a shared lock; return False if another holder has the exclusive lock."""
        return self._try_lock(fcntl.LOCK_SH)

    def unlock(self) -> None:
        """Drop the lock."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def holders(self) -> list[int]:
        """Return the ids of the processes that hold a lock, for messages; processes in other PID namespaces are
        missing."""
        stat = os.fstat(self.fd)
        file = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        try:
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return []
        # 1: FLOCK ADVISORY READ <pid> <major>:<minor>:<inode> 0 EOF
        rows = (line.split() for line in lines)
        return sorted({int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == file})

    def is_current(self) -> bool:
        """True if the path still leads to this file; False if the path is gone or leads to a newer file."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.fd).st_size

    def identity(self) -> tuple[int, int]:
        """Device and inode, which identify the file."""
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino

    def unlink(self) -> None:
        """Remove the name; the memory is freed with the last mapping."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock and close the file; mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()

    def _try_lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Segment(LockedFile):
    """Mapped segment: ``header`` (one page) and ``data``, uint8 [capacity].

    The mapping lives until no view of ``data`` is left, so arrays made from it stay valid; their content may change
    after the lock is released.
    """

    def __init__(
        self, path: Path, fd: int, access: Access = "write", on_piece: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(path, fd)
        mapping = map_file(fd, access, on_piece)
        self.header = memoryview(mapping)[:DATA_OFFSET]
        self.data: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)[DATA_OFFSET:]

    @classmethod
    def create(cls, path: Path, capacity: int, on_piece: Callable[[], None] = lambda: None) -> Segment:
        """Create a zeroed segment whose pages are allocated and mapped, so that its first write is fast. Takes about a
        second per gigabyte; ``on_piece`` is called after each piece.

        Raises:
            Unavailable: the directory has no room. (Without the reservation a write would end the process by SIGBUS.)
            FileExistsError: the file exists.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _reserve(fd, DATA_OFFSET + capacity, on_piece)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise Unavailable(
                f"no room for {capacity} bytes in {path.parent} ({_free_bytes(path.parent)} free): "
                f"{error.strerror}; enlarge the tmpfs (docker: shm_size) or point PENSTOCK_SHM_DIR elsewhere"
            ) from None
        return cls(path, fd, on_piece=on_piece)


class Owner:
    """Proof that the process that owns segments ``<prefix><id>-<n>`` is alive: the process holds the lock of
    ``<prefix><id>.owner``."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.directory = directory
        self._count = 0
        while True:
            self.stem = f"{prefix}{secrets.token_hex(8)}"
            path = directory / f"{self.stem}.owner"
            self._file = LockedFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            if self._file.try_exclusive() and self._file.is_current():
                return
            self._file.close()  # a sweeper came between creation and lock and removed it

    def next_path(self) -> Path:
        """Return the path for a new segment; no other segment ever has this path."""
        self._count += 1
        return self.directory / f"{self.stem}-{self._count}"

    def close(self) -> None:
        """Remove all segments and the owner file."""
        for path in self.directory.glob(f"{self.stem}-*"):
            path.unlink(missing_ok=True)
        self._file.unlink()
        self._file.close()


def sweep(directory: Path, prefix: str) -> list[Path]:
    """Remove the segments and owner files of processes that ended; return the removed paths."""
    removed = []
    for path in directory.glob(f"{prefix}*.owner"):
        try:
            owner = LockedFile.open(path)
        except (NotFound, Unavailable):  # removed by another process, or owned by another user
            continue
        if owner.try_exclusive():
            removed += [*directory.glob(f"{path.stem}-*"), path]
            for file in (*directory.glob(f"{path.stem}-*"), path):
                file.unlink(missing_ok=True)
        owner.close()
    return removed


def remove_unheld(paths: Iterable[Path]) -> None:
    """Remove the files of ``paths`` that no process has locked."""
    for path in paths:
        with contextlib.suppress(NotFound, Unavailable):  # removed by another process, or owned by another user
            file = LockedFile.open(path)
            if file.try_exclusive():
                file.unlink()
            file.close()


def _reserve(fd: int, nbytes: int, on_piece: Callable[[], None]) -> None:
    """Allocate the pages of a file. Raises OSError if the file system lacks room, which is checked first."""
    if nbytes > _free_bytes(Path(f"/proc/self/fd/{fd}")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for start in range(0, nbytes, _PIECE):
        os.posix_fallocate(fd, start, min(_PIECE, nbytes - start))
        on_piece()


def _free_bytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else sys.maxsize  # a tmpfs without a limit has no blocks


def map_file(fd: int, access: Access, on_piece: Callable[[], None] = lambda: None) -> mmap.mmap:
    """Map a whole file, fill the page table of the mapping, and return the mapping; ``on_piece`` is called after each
    piece.

    The mapping has its own open file: a mapping keeps a duplicate of its descriptor and thereby the lock of that open
    file, so closing ``fd`` would otherwise not release the lock while an array of the mapping lives.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        flags = mmap.MAP_PRIVATE if access == "private" else mmap.MAP_SHARED
        prot = mmap.PROT_READ if access == "read" else mmap.PROT_READ | mmap.PROT_WRITE
        mapping = mmap.mmap(own, 0, flags=flags, prot=prot)
    finally:
        os.close(own)
    # Not MAP_POPULATE, which would copy every page of a private mapping; this only fills the page table.
    advice = _MADV_POPULATE_WRITE if access == "write" else _MADV_POPULATE_READ
    with contextlib.suppress(OSError):  # an older kernel: pages are mapped at the first access
        for start in range(0, len(mapping), _PIECE):
            mapping.madvise(advice, start, min(_PIECE, len(mapping) - start))
            on_piece()
    return mapping
