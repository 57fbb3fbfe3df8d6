"""Files of committed checkpoints on this host, by the sha256 of their content. Reads the disk: call it in a thread."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.services.coordinator.checkpoints import read_stored
from penstock.shared.errors import NotFound

__all__ = ["Artifacts"]

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Artifacts:
    """Finds files below ``root`` (one directory per job, one per checkpoint in it).

    What a commit names never changes, so each is read once; every replica finds the same by itself.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[Path, dict[str, str]] = {}

    def find(self, sha256: str) -> Path:
        """A file with this content. Raises NotFound."""
        if not _SHA256.fullmatch(sha256):
            raise NotFound(f"'{sha256[:80]}' is no sha256: 64 hex digits")
        folders = sorted(path.parent for path in self._root.glob("*/*/COMMIT"))
        self._known = {folder: known for folder, known in self._known.items() if folder in set(folders)}
        for folder in folders:
            if folder not in self._known:
                stored = read_stored(folder)
                self._known[folder] = {} if stored is None else {f.sha256: name for name, f in stored.files.items()}
            name = self._known[folder].get(sha256)
            path = folder / name if name is not None else None
            if path is not None and path.resolve().is_relative_to(folder.resolve()) and path.is_file():
                return path
        raise NotFound(f"no committed checkpoint on the coordinator's host holds a file with sha256 {sha256}")
