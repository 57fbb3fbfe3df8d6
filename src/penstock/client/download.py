"""Downloads: resumed after an interruption, verified, then moved to their final path."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from urllib.parse import quote

from penstock.client.calls import Row
from penstock.shared.errors import CheckpointError, Conflict, NotFound, ProtocolError

__all__ = ["Download", "archive", "artifact", "film", "plan_downloads"]


class Download:
    """A download that collects bytes in ``NAME.part`` beside ``path``; leaving the context early keeps this file.

    Args:
        url: path of the file on the server.
        path: destination.
        name: name of the file in messages.
        sha256: SHA-256 of the content, in hex; None: unknown, so that the file ends where the reply ends, and an
        interrupted download starts over.
        nbytes: size of the file in bytes; None: unknown.
    """

    def __init__(
        self, url: str, path: Path, *, name: str, sha256: str | None = None, nbytes: int | None = None
    ) -> None:
        self.url, self.path, self.name = url, path, name
        self._sha256, self._nbytes = sha256, nbytes
        self._part = path.with_name(path.name + ".part")
        self._file: BinaryIO | None = None
        self._finished = False

    @property
    def is_done(self) -> bool:
        """True if the file is complete and unchanged at its destination."""
        if self._finished or self._sha256 is None:
            return self._finished
        return self.path.is_file() and self._fits(self.path)

    @property
    def received(self) -> int:
        """Bytes received so far."""
        return self._part.stat().st_size if self._part.exists() else 0

    def headers(self) -> dict[str, str]:
        """Return headers that request the missing rest of the file, or the whole file if it has changed on the
        server."""
        start = self.received
        if self._sha256 is None or start == 0 or (self._nbytes is not None and start >= self._nbytes):
            return {}
        return {"Range": f"bytes={start}-", "If-Range": f'"{self._sha256}"'}

    def begin(self, status: int) -> None:
        """Open the part file: append to it if the server sends the rest (206), else overwrite it (200)."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("ab" if status == 206 else "wb")

    def write(self, data: bytes) -> None:
        """Write the next bytes."""
        assert self._file is not None, "begin comes first"
        self._file.write(data)

    def finish(self) -> None:
        """Verify the file and move it to its destination.

        Raises:
            CheckpointError: the file has the wrong size or hash; the received bytes are deleted.
        """
        self.close()
        if not self._fits(self._part):
            self.start_over()
            raise CheckpointError(f"'{self.name}' did not arrive as it was committed; download it again")
        self._part.replace(self.path)
        self._finished = True

    def start_over(self) -> None:
        """Delete the received bytes."""
        self.close()
        self._part.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the part file, and keep its bytes."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Download:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fits(self, path: Path) -> bool:
        if self._nbytes is not None and path.stat().st_size != self._nbytes:
            return False
        return self._sha256 is None or _sha256(path) == self._sha256


def plan_downloads(job: str, row: Row, directory: Path, names: Collection[str] | None) -> list[Download]:
    """Return the downloads of a checkpoint's files, except those that ``directory`` already has. ``names`` restricts
    the files (None: all).

    Raises:
        Conflict: the server does not have the files.
        NotFound: a name is not one of the checkpoint's files.
        ProtocolError: a name would lead outside ``directory``.
    """
    if not row["available"]:
        raise Conflict(f"the files of checkpoint {row['number']} ({row['path']}) are not on the coordinator's host")
    files = {str(file["name"]): file for file in row["files"]}
    unknown = sorted(set(names or ()) - set(files))
    if unknown:
        raise NotFound(f"checkpoint {row['number']} has no file '{unknown[0]}'; it has: {', '.join(files)}")
    wanted = [file for name, file in files.items() if names is None or name in names]
    found = [_of_checkpoint(job, row["number"], file, directory) for file in wanted]
    return [download for download in found if not download.is_done]


def archive(job: str, number: int, path: Path) -> Download:
    """Return the download of a checkpoint as one tar."""
    return Download(f"/v1/jobs/{job}/checkpoints/{number}/archive", path, name=path.name)


def artifact(sha256: str, path: Path) -> Download:
    """Return the download of a file of any checkpoint, by its hash."""
    return Download(f"/v1/artifacts/{quote(sha256, safe='')}", path, name=path.name, sha256=sha256)


def film(job: str, name: str, path: Path) -> Download:
    """Return the download of a video of a job."""
    return Download(f"/v1/jobs/{job}/videos/{quote(name, safe='')}", path, name=path.name)


def _of_checkpoint(job: str, number: int, file: Row, directory: Path) -> Download:
    name = str(file["name"])
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ProtocolError(f"the server names a file '{name}' that lies outside of {directory}")
    url = f"/v1/jobs/{job}/checkpoints/{number}/files/{quote(name)}"
    return Download(url, path, name=name, sha256=str(file["sha256"]), nbytes=int(file["nbytes"]))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
