"""Questions about processes that may end at any moment."""

from __future__ import annotations

import psutil

__all__ = ["is_alive"]


def is_alive(process: psutil.Process | int) -> bool:
    """Return False for an ended process, even if its parent never waits for it."""
    try:
        return (psutil.Process(process) if isinstance(process, int) else process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
