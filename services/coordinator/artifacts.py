"""Files of committed checkpoints on this host, by the sha256 of their content. Reads the disk: call it in a thread."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from penstock.services.coordinator.checkpoints import read_stored
from penstock.shared.errors import NotFound

__all__ = ["Artifacts"]

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Artifacts:
    """Finds files below ``root`` (one directory per job, one per checkpoint in it).

    What a commit names never changes, so each is read once; every replica finds the same by itself.
    Threads may share it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[Path, dict[str, str]] = {}
        self._lock = threading.Lock()

    def find(self, sha256: str) -> Path:
        """A file with this content. Raises NotFound."""
        if not _SHA256.fullmatch(sha256):
            raise NotFound(f"'{sha256[:80]}' is no sha256: 64 hex digits")
        with self._lock:
            path = self._find(sha256)
        if path is not None:
            return path
        raise NotFound(f"no committed checkpoint on the coordinator's host holds a file with sha256 {sha256}")

    def _find(self, sha256: str) -> Path | None:
        folders = {path.parent for path in self._root.glob("*/*/COMMIT")}
        self._known = {folder: known for folder, known in self._known.items() if folder in folders}
        for folder in sorted(folders):
            name = self._files(folder).get(sha256)
            path = folder / name if name is not None else None
            if path is not None and path.resolve().is_relative_to(folder.resolve()) and path.is_file():
                return path
        return None

    def _files(self, folder: Path) -> dict[str, str]:
        """Names by sha256. A manifest that cannot be read is tried again the next time."""
        if folder not in self._known:
            stored = read_stored(folder)
            if stored is None:
                return {}
            self._known[folder] = {file.sha256: name for name, file in stored.files.items()}
        return self._known[folder]
