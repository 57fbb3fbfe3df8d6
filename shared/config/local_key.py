"""The key of a deployment that ``penstock up`` runs: a file in its data directory, which clients of the same user find.

``~/.penstock/urls/HOST:PORT`` names the data directory of the deployment that listens there. A client reads the key
only while that deployment runs, or it would hand the key to whoever took the port.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from penstock.shared.errors import ConfigError

__all__ = ["LOCK", "announce_key", "announced_dirs", "ensure_secret", "find_key", "key_file", "withdraw_key"]

LOCK = "up.lock"
"""File in a data directory that a running ``penstock up`` holds locked."""
_LOOPBACK = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


def key_file(data_dir: Path) -> Path:
    """Where the key of a deployment stands."""
    return data_dir / "api.key"


def ensure_secret(file: Path) -> str:
    """The secret in ``file``, which only this user may read; a new one where there is none.

    Raises:
        ConfigError: the file cannot be read or written, is empty, or other users may read it.
    """
    try:
        draft = file.with_suffix(f".{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as new:
            new.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(draft, file)  # whoever comes first wins
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"other users may read {file}: chmod 600 {file}, or remove it for a new one")
        found = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot keep a secret in {file}: {error}") from None
    if not found:
        raise ConfigError(f"{file} is empty: remove it for a new secret")
    return found


def announce_key(url: str, data_dir: Path) -> None:
    """Let this user's clients find the key for ``url``. Raises OSError."""
    entry = _entry(url)
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = entry.with_name(f".{entry.name}.{os.getpid()}")
    draft.write_text(f"{data_dir.absolute()}\n")
    draft.replace(entry)


def withdraw_key(url: str, data_dir: Path) -> None:
    """Undo ``announce_key``, unless another deployment listens there now. Raises OSError."""
    entry = _entry(url)
    if entry.is_file() and entry.read_text().strip() == str(data_dir.absolute()):
        entry.unlink()


def find_key(url: str) -> str | None:
    """The key for ``url``, where a deployment of this user listens there; else None."""
    try:
        data_dir = Path(_entry(url).read_text().strip())
        with (data_dir / LOCK).open("rb") as lock:
            if _is_free(lock.fileno()):
                return None
        return key_file(data_dir).read_text().strip() or None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home
        return None


def announced_dirs() -> list[Path]:
    """Data directories of this user's deployments, of those that ended without a word, too."""
    found = set()
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home
        for entry in (Path.home() / ".penstock" / "urls").iterdir():
            with contextlib.suppress(OSError, ValueError):
                found.add(Path(entry.read_text().strip()))
    return sorted(found)


def _entry(url: str) -> Path:
    split = urlsplit(url)
    host = _LOOPBACK.get(split.hostname or "", split.hostname or "")
    port = split.port or (443 if split.scheme == "https" else 80)
    return Path.home() / ".penstock" / "urls" / f"{host}:{port}".replace("/", "_")


def _is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True  # and released again when the caller closes the file
