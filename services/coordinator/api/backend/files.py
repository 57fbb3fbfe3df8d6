"""Uploaded files as the HTTP API uses them. Implemented in ``coordinator.files``."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["CodeRecord", "FileRecord", "Files", "Purpose"]

Purpose = Literal["fine-tune"]


class FileRecord(BaseModel):
    """An uploaded file, in the shape of OpenAI's files; ``sha256`` in hex."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(description="Unix time, in seconds")
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    sha256: str
    rows: int = Field(description="Lines that hold a row")


class CodeRecord(BaseModel):
    """An uploaded file of Python; job files name what is in it by ``NAME@SHA256:FUNCTION``."""

    model_config = ConfigDict(frozen=True)

    object: Literal["code"] = "code"
    sha256: str
    bytes: int


class Files(Protocol):
    """Uploaded data sets. Every method reads or writes the disk: call it in a thread."""

    def add(self, source: BinaryIO, filename: str, purpose: Purpose, *, key: str = "") -> FileRecord:
        """Keep a copy of ``source``; it is on disk when this returns. The same ``key`` and bytes are the same file.

        Raises:
            HttpProblem: 422, not JSON lines; points at each bad line. 422, the key was used for other bytes. 507, no
                room for it.
        """
        ...

    def add_code(self, source: str) -> CodeRecord:
        """Keep a file of Python under the SHA-256 of its UTF-8; on disk when this returns. The same file is kept once.

        Raises:
            HttpProblem: 422, not Python; names the line. 507, no room for it.
        """
        ...

    def find(self, id: str) -> FileRecord:
        """Raises NotFound."""
        ...

    def list_all(self) -> list[FileRecord]:
        """Every file, oldest first."""
        ...

    def content(self, id: str) -> Path:
        """Where its bytes are. Raises NotFound."""
        ...

    def delete(self, id: str) -> None:
        """Raises NotFound."""
        ...
