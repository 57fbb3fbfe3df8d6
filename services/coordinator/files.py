"""Stores uploaded files in the data directory: data sets in ``files/ID/rows.jsonl``, small models in
``files/ID/model/``, and user code in ``code/SHA256.py``. Once a data set or a model is on disk, its record
``files/ID/file.json`` is written.

``files/keys/DIGEST`` maps an Idempotency-Key to its file, and ``files/ID/key`` maps back. Services read the files by
path, like checkpoints: they must see the same data directory.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import BinaryIO, Literal

import orjson
import uuid6
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.shared.config.model import MAX_MODEL_FILES, MODEL_FILE
from penstock.shared.data.files import MODEL, ROWS, is_uploaded
from penstock.shared.data.user_code import code_path
from penstock.shared.errors import Flaw, Invalid, NoRoom, NotFound
from penstock.shared.protocol.bus_clock import bus_time

__all__ = ["CodeRecord", "FileRecord", "FileStore", "Purpose"]

Purpose = Literal["fine-tune", "model"]
RECORD, KEY, KEYS = "file.json", "key", "keys"
MAX_LINE_BYTES = 8 << 20
MAX_FLAWS = 20
MAX_CODE_FILES = 10_000
_END, _LOCATOR_BYTES = struct.Struct("<4sHHHHIIH"), 20
"""``_END``: layout of the record that ends a ZIP archive; its sixth field is the size in bytes of the archive's central
directory. In an archive with 64-bit sizes, a locator of ``_LOCATOR_BYTES`` bytes precedes that record."""
MAX_ENTRY_BYTES = 512
"""Largest size in bytes of a file's entry in the central directory of a ZIP archive."""
ABANDONED_S = 3600.0
"""Age after which a half-written upload is removed (seconds). No upload takes so long, so a crash must have left it."""


class FileRecord(BaseModel):
    """An uploaded file in the format of OpenAI's files API; ``sha256`` is in hex."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(description="Unix time, in seconds")
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    sha256: str
    rows: int = Field(description="Lines that hold a row; 0 for a model")


class CodeRecord(BaseModel):
    """An uploaded Python file; job files name its functions by ``NAME@SHA256:FUNCTION``."""

    model_config = ConfigDict(frozen=True)

    object: Literal["code"] = "code"
    sha256: str
    bytes: int


class FileStore:
    """Uploaded data sets, models and code, the same on every replica that shares the directory.

    Every method reads or writes the disk: call it in a thread.
    """

    def __init__(self, root: Path, *, max_bytes: int, max_files: int) -> None:
        self._root, self._max_bytes, self._max_files = root, max_bytes, max_files
        self._lock = threading.Lock()
        """Lock under which an upload checks for free space and takes it, so that two uploads cannot take the same
        space."""

    def add(self, source: BinaryIO, filename: str, purpose: Purpose, *, key: str = "") -> FileRecord:
        """Store a copy of ``source``; return its record once the copy is on disk.

        A repeated call with the same ``key``, file name and bytes stores nothing and returns the first record.

        Raises:
            Invalid: ``source`` is not JSON lines (with the invalid lines), or for the purpose `model` not an archive of
                a model, or the key was used for another file.
            NoRoom: as many files or bytes as allowed are kept.
        """
        self._clear_away()
        id = f"file-{uuid6.uuid7().hex}"
        folder = self._root / id
        folder.mkdir(parents=True)
        try:
            copy = _unpack_model if purpose == "model" else _copy_rows
            nbytes, rows, sha256 = copy(source, folder / (MODEL if purpose == "model" else ROWS))
            record = FileRecord(
                id=id, bytes=nbytes, created_at=int(bus_time()), filename=filename, purpose=purpose, sha256=sha256,
                rows=rows,
            )  # fmt: skip
            with self._lock:
                earlier = self._earlier(key, record)
                if earlier is None:
                    self._check_room(nbytes)
                    self._publish(folder, record, key)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if earlier is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return earlier or record

    def add_code(self, source: str) -> CodeRecord:
        """Store Python source once, under the SHA-256 of its UTF-8; return its record when it is on disk.

        Raises:
            Invalid: ``source`` is not Python (the text names the line).
            NoRoom: as many files of code as allowed are kept.
        """
        try:
            data = source.encode()
            compile(data, "code", "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            detail = f"not Python{f', line {line}' if line else ''}: {getattr(error, 'msg', None) or error}"
            raise Invalid("invalid_file", detail, [Flaw(pointer="/source", detail=detail)]) from None
        record = CodeRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        path = code_path(self._root.parent, record.sha256)
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                known = sum(1 for _ in path.parent.iterdir())
                if known >= MAX_CODE_FILES:
                    raise NoRoom("files_full", f"{known} files of code are kept already, in {path.parent}")
                _write(path, data)
                _sync(path.parent)
        return record

    def _publish(self, folder: Path, record: FileRecord, key: str) -> None:
        """Write the record of a complete upload, durably: ``find`` returns the file from now on, also after a crash."""
        if key:
            _write(folder / KEY, _digest(key).encode())
        _write(folder / RECORD, record.model_dump_json().encode())
        if key:
            (self._root / KEYS).mkdir(exist_ok=True)
            _write(self._root / KEYS / _digest(key), record.id.encode())
        for directory in (folder, self._root):
            _sync(directory)

    def _earlier(self, key: str, record: FileRecord) -> FileRecord | None:
        """Return the record of an earlier upload with the Idempotency-Key ``key``, or None. Raises Invalid if that
        upload was not the same file as the new one, which ``record`` describes."""
        try:
            found = self.find((self._root / KEYS / _digest(key)).read_text()) if key else None
        except (OSError, NotFound):  # never used, or that file is deleted
            return None
        if found is not None and (found.sha256, found.filename) != (record.sha256, record.filename):
            raise Invalid("idempotency_key_reused", "this Idempotency-Key was used with another file; use a new key")
        return found

    def _check_room(self, nbytes: int) -> None:
        """Raise NoRoom if the limits on the number and bytes of files leave no room for another file of ``nbytes``."""
        known = self.list_all()
        total = sum(record.bytes for record in known) + nbytes
        if len(known) >= self._max_files or total > self._max_bytes:
            raise NoRoom(
                "files_full",
                f"{len(known)} files with {total - nbytes} bytes are kept, of at most {self._max_files} with "
                f"{self._max_bytes} bytes (PENSTOCK_MAX_FILES, PENSTOCK_FILES_BYTES); delete some first",
            )

    def _clear_away(self) -> None:
        """Remove files that crashes left half written or half deleted."""
        self._root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._root) as probe:  # the file system's clock, not ours
            old = Path(probe.name).stat().st_mtime - ABANDONED_S
        for folder in self._root.glob("file-*"):
            with contextlib.suppress(OSError):
                if not (folder / RECORD).exists() and folder.stat().st_mtime < old:
                    shutil.rmtree(folder, ignore_errors=True)

    def find(self, id: str) -> FileRecord:
        """Return the record of a file. Raises NotFound."""
        if is_uploaded(id):
            with contextlib.suppress(OSError, ValidationError):
                return FileRecord.model_validate_json((self._root / id / RECORD).read_bytes())
        raise NotFound(f"no file '{id[:80]}'")

    def list_all(self) -> list[FileRecord]:
        """Return all complete files, oldest first."""
        found = []
        for path in sorted(self._root.glob(f"*/{RECORD}")):
            with contextlib.suppress(NotFound):
                found.append(self.find(path.parent.name))
        return found

    def content(self, id: str) -> Path:
        """Return the path of the file's rows. Raises NotFound: no such file, or it is a model."""
        if self.find(id).purpose == "model":
            raise NotFound(f"file '{id}' is a model, not a data set")
        return self._root / id / ROWS

    def model(self, id: str) -> Path:
        """Return the directory of an uploaded model. Raises NotFound: no such file, or it is a data set."""
        if self.find(id).purpose != "model":
            raise NotFound(f"file '{id}' is a data set, not a model")
        return self._root / id / MODEL

    def delete(self, id: str) -> None:
        """Delete a file. Raises NotFound."""
        folder = self._root / self.find(id).id
        with contextlib.suppress(OSError):
            (self._root / KEYS / (folder / KEY).read_text()).unlink(missing_ok=True)
        (folder / RECORD).unlink(missing_ok=True)  # first: an interrupted deletion leaves no complete file
        shutil.rmtree(folder, ignore_errors=True)


def _copy_rows(source: BinaryIO, path: Path) -> tuple[int, int, str]:
    """Copy and check JSON lines; return size in bytes, number of rows and SHA-256. Raises Invalid."""
    digest, rows, nbytes = hashlib.sha256(), 0, 0
    flaws: list[Flaw] = []
    with path.open("wb") as file:
        for number, line in enumerate(iter(lambda: source.readline(MAX_LINE_BYTES + 1), b""), 1):
            problem = _problem(line)
            if problem:
                flaws.append(Flaw(pointer=f"/file/line/{number}", detail=problem))
            if len(flaws) == MAX_FLAWS or len(line) > MAX_LINE_BYTES:
                break
            digest.update(line)
            file.write(line)
            rows, nbytes = rows + bool(line.strip()), nbytes + len(line)
        file.flush()
        os.fsync(file.fileno())
    if not rows and not flaws:
        flaws.append(Flaw(pointer="/file", detail="there is not a single row"))
    if flaws:
        where = flaws[0].pointer.removeprefix("/file").replace("/", " ").strip()
        detail = ": ".join(["the file is not JSON lines", *filter(None, [where]), flaws[0].detail])
        raise Invalid("invalid_file", detail, flaws)
    return nbytes, rows, digest.hexdigest()


def _unpack_model(source: BinaryIO, folder: Path) -> tuple[int, int, str]:
    """Unpack an archive into ``folder``; return the archive's size in bytes, 0 (a model has no rows), and its SHA-256.
    Raises Invalid."""
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
    nbytes = source.tell()
    folder.mkdir()
    try:
        with _archive(source) as archive:
            entries = archive.infolist()
            names = {entry.filename for entry in entries}
            if "config.json" not in names or len(names) != len(entries) or len(entries) > MAX_MODEL_FILES:
                raise ValueError(f"a model has a config.json, and at most {MAX_MODEL_FILES} files")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("its files must be stored, not compressed")
            if sum(entry.file_size for entry in entries) > nbytes:
                raise ValueError("its files overlap")
            for entry in entries:
                if not MODEL_FILE.fullmatch(entry.filename):
                    raise ValueError(
                        f"'{entry.filename[:80]}' is no file of a model: .json, .safetensors, .jinja, .txt"
                    )
                _write(folder / entry.filename, _read(archive, entry))
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError, OverflowError) as error:
        detail = f"the file is not a ZIP archive of a model: {error}"
        raise Invalid("invalid_file", detail, [Flaw(pointer="/file", detail=detail)]) from None
    _sync(folder)
    return nbytes, 0, digest.hexdigest()


def _archive(source: BinaryIO) -> zipfile.ZipFile:
    """Open a ZIP archive. Raises ValueError if its central directory is damaged, or is too long for an archive of
    at most MAX_MODEL_FILES files."""
    source.seek(-min(source.tell(), _LOCATOR_BYTES + _END.size), os.SEEK_END)
    tail = source.read()
    if len(tail) < _END.size or not tail.startswith(b"PK\5\6", -_END.size) or tail.startswith(b"PK\6\7"):
        raise ValueError("its end is damaged, or it has a comment or 64-bit sizes")
    if _END.unpack(tail[-_END.size :])[5] > MAX_MODEL_FILES * MAX_ENTRY_BYTES:
        raise ValueError(f"a model has a config.json, and at most {MAX_MODEL_FILES} files")
    try:
        return zipfile.ZipFile(source)
    except OSError as error:  # the directory names a place outside of the file
        raise ValueError(str(error)) from None


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return the bytes of one file of an archive, checked by their CRC.

    Raises:
        ValueError: the archive's directory gives a position of the file that is outside of the archive.
    """
    try:
        return archive.read(entry)
    except OSError as error:
        raise ValueError(f"'{entry.filename[:80]}': {error}") from None


def _problem(line: bytes) -> str:
    """Return what is wrong with a line, or '' if the line is a JSON object or empty."""
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES} bytes"
    if not line.strip():
        return ""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"not valid JSON: {error}"
    return "" if isinstance(row, dict) else f"must be an object, found {type(row).__name__}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _sync(folder: Path) -> None:
    """Flush a directory to disk, so that new file names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
