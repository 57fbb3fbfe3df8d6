"""A file on its way from a checkpoint to this disk: resumed where it broke off, verified, then named."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from urllib.parse import quote

from penstock.client.calls import Row
from penstock.shared.errors import CheckpointError, Conflict, NotFound, ProtocolError

__all__ = ["Download", "plan_downloads"]


class Download:
    """Collects a file under ``NAME.part`` beside its place; leaving the context in between keeps what is there."""

    def __init__(self, job: str, number: int, file: Row, directory: Path) -> None:
        """Raises ProtocolError for a name that would lead out of ``directory``."""
        self.name, self.nbytes, self._sha256 = str(file["name"]), int(file["nbytes"]), str(file["sha256"])
        self.url = f"/v1/jobs/{job}/checkpoints/{number}/files/{quote(self.name)}"
        self.path = directory / self.name
        if not self.path.resolve().is_relative_to(directory.resolve()):
            raise ProtocolError(f"the server names a file '{self.name}' that lies outside of {directory}")
        self._part = self.path.with_name(self.path.name + ".part")
        self._file: BinaryIO | None = None

    @property
    def is_done(self) -> bool:
        """The file is there, complete and unchanged."""
        return self.path.is_file() and self.path.stat().st_size == self.nbytes and _sha256(self.path) == self._sha256

    @property
    def received(self) -> int:
        """Bytes that are here."""
        return self._part.stat().st_size if self._part.exists() else 0

    def headers(self) -> dict[str, str]:
        """Ask for the rest, or for all of it where the file on the server is another one by now."""
        start = self.received
        return {"Range": f"bytes={start}-", "If-Range": f'"{self._sha256}"'} if 0 < start < self.nbytes else {}

    def begin(self, status: int) -> None:
        """The server answers with the rest (206) or with all of it (200)."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("ab" if status == 206 else "wb")

    def write(self, data: bytes) -> None:
        """The next bytes."""
        assert self._file is not None, "begin comes first"
        self._file.write(data)

    def finish(self) -> None:
        """Verify and name the file.

        Raises:
            CheckpointError: its bytes are not those that the checkpoint was committed with; they are thrown away.
        """
        self.close()
        if self.received != self.nbytes or _sha256(self._part) != self._sha256:
            self._part.unlink(missing_ok=True)
            raise CheckpointError(f"'{self.name}' did not arrive as it was committed; download it again")
        self._part.replace(self.path)

    def close(self) -> None:
        """Keep what is there."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Download:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan_downloads(job: str, row: Row, directory: Path, names: Collection[str] | None) -> list[Download]:
    """The downloads of a checkpoint, or of some of its files, that are not done yet.

    Raises:
        Conflict: the server does not have the files.
        NotFound: a name is not one of the checkpoint's files.
    """
    if not row["available"]:
        raise Conflict(f"the files of checkpoint {row['number']} ({row['path']}) are not on the coordinator's host")
    files = {str(file["name"]): file for file in row["files"]}
    unknown = sorted(set(names or ()) - set(files))
    if unknown:
        raise NotFound(f"checkpoint {row['number']} has no file '{unknown[0]}'; it has: {', '.join(files)}")
    wanted = [file for name, file in files.items() if names is None or name in names]
    found = [Download(job, row["number"], file, directory) for file in wanted]
    return [download for download in found if not download.is_done]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
