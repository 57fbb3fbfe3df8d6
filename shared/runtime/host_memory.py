"""Memory that the processes of this host or container may use."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["memory_bytes"]

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Return the memory of this host, or the lowest limit of this process's cgroups (version 1 or 2) if it is less."""
    found = [psutil.virtual_memory().total]
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _limits(MOUNT, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(MOUNT / "memory", path, "memory.limit_in_bytes")
    return min(found)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of a cgroup and of those above it. In a container ``path`` may not exist below ``root``."""
    folder, limits = root / path.lstrip("/"), []
    for one in (folder, *folder.parents):
        if not one.is_relative_to(root):
            break
        try:
            text = (one / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # without a limit: "max"
            limits.append(int(text))
    return limits
