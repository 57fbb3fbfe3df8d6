"""API key of a deployment started by ``penstock up``. The key is in a file in the deployment's data directory; clients
that the same user runs find it there.

``~/.penstock/urls/HOST:PORT`` contains the data directory of the deployment that listens there. A client reads the key
only while that deployment runs; otherwise it could send the key to another process that took over the port.
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
"""Lock file in a data directory, locked by a running ``penstock up``."""
_LOOPBACK = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


def key_file(data_dir: Path) -> Path:
    """Return the path of the key file of a deployment."""
    return data_dir / "api.key"


def ensure_secret(file: Path) -> str:
    """Return the secret in ``file``, readable by this user only; create it if the file does not exist.

    Raises:
        ConfigError: the file cannot be read or written, is empty, or other users may read it.
    """
    try:
        draft = file.with_suffix(f".{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as new:
            new.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(draft, file)  # the first process to link its draft wins
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
    """Record the data directory of the deployment at ``url``, so that clients of this user find its API key there.
    Raises OSError."""
    entry = _entry(url)
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = entry.with_name(f".{entry.name}.{os.getpid()}")
    draft.write_text(f"{data_dir.absolute()}\n")
    draft.replace(entry)


def withdraw_key(url: str, data_dir: Path) -> None:
    """Remove the record that ``announce_key`` wrote, unless another deployment at ``url`` has overwritten it. Raises
    OSError."""
    entry = _entry(url)
    if entry.is_file() and entry.read_text().strip() == str(data_dir.absolute()):
        entry.unlink()


def find_key(url: str) -> str | None:
    """Return the key for ``url`` if a deployment of this user listens there, else None."""
    try:
        data_dir = Path(_entry(url).read_text().strip())
        with (data_dir / LOCK).open("rb") as lock:
            if _is_free(lock.fileno()):
                return None
        return key_file(data_dir).read_text().strip() or None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home directory
        return None


def announced_dirs() -> list[Path]:
    """Return the data directories that this user's deployments recorded with ``announce_key``, including deployments
    that crashed before ``withdraw_key``."""
    found = set()
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home directory
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
    return True  # the lock is released when the caller closes the file
