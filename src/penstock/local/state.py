"""Ownership of a data directory by one stack: a lock that the kernel releases when the stack's process ends, and a file
with the stack's addresses."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

import msgspec

from penstock.shared.config.local_key import LOCK
from penstock.shared.errors import ConfigError

__all__ = ["Claim", "UpState", "read_state"]


PATIENCE_S = 0.5
"""Time to wait for the lock, which readers of the state hold for a moment (seconds)."""


class UpState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``up.json``: addresses and process ids of the running stack."""

    pid: int
    url: str
    nats_url: str
    """URL of the bus with all permissions, for users and tools."""
    redis_url: str | None
    data_dir: str
    started: float
    processes: dict[str, int]
    """Process id by name."""
    nats_urls: dict[str, str] = {}
    """By service: bus URL for a further worker of this service."""


class Claim:
    """The right to run a stack in ``data_dir``, held until ``release`` or the end of the process.

    Raises:
        ConfigError: another process holds it.
    """

    def __init__(self, data_dir: Path) -> None:
        self._state = data_dir / "up.json"
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if data_dir.stat().st_mode & 0o077:
                data_dir.chmod(0o700)  # contains keys, passwords and user data
            self._lock = (data_dir / LOCK).open("wb")
        except OSError as error:
            raise ConfigError(f"cannot write to {data_dir}: {error.strerror}; choose another with --data-dir") from None
        if not _locked_within(self._lock.fileno(), PATIENCE_S):
            self._lock.close()
            running = read_state(data_dir)
            where = f" (process {running.pid}, {running.url})" if running else ""
            raise ConfigError(
                f"a stack already runs in {data_dir}{where}; end it with 'penstock down', or choose another --data-dir"
            )

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def write(self, state: UpState) -> None:
        """Replace the state file atomically. Only this user can read it, because addresses may contain passwords."""
        draft = self._state.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state)))
        draft.replace(self._state)

    def release(self) -> None:
        """Remove the state file and release the lock."""
        if not self._lock.closed:
            self._state.unlink(missing_ok=True)
            self._lock.close()


def read_state(data_dir: Path) -> UpState | None:
    """Return the state of the stack that runs in ``data_dir``, or None. A file left by a crash is ignored."""
    try:
        state = msgspec.json.decode((data_dir / "up.json").read_bytes(), type=UpState)
        with (data_dir / LOCK).open("rb") as lock:
            return None if _is_free(lock.fileno()) else state
    except (OSError, msgspec.DecodeError):
        return None


def _locked_within(lock: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def _is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True  # released when the caller closes the file
